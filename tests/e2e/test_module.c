/* test_module.c: the module in python/ where it needs no server: data sets as JSONL. The rest of it
 * is packaging/try-wheel's, and the examples' in test_bridge_library.c and test_tinker_sdk.c. */
// SPDX-License-Identifier: Apache-2.0
#include "tests/support/support.h"

TEST(test_data)
{
    const char *script = test_path(test_root(), "tests/clients/data.py");
    assert_contains(test_output(0, OPTIONS(test_python("datasets"), script, test_folder())),
                    "data: PASS");
}
