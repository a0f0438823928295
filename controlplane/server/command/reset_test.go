package command

import (
	"bytes"
	"strings"
	"testing"
)

// A recovery names the machines that must be reset before they boot, and the commands for it. F53
func TestRecoverNamesTheMachinesToReset(t *testing.T) {
	var out bytes.Buffer
	printReset(&out, map[string]string{"cp3": "[2001:db8::3]:6445", "cp2": "192.0.2.12:6445"}, "192.0.2.11")
	for _, want := range []string{"cp2 (192.0.2.12), cp3 (2001:db8::3)",
		"keelson-controlplane rebuild --server 192.0.2.11\n", "systemctl stop", "clients other than agents and kctl"} {
		if !strings.Contains(out.String(), want) {
			t.Errorf("%q is missing in:\n%s", want, &out)
		}
	}
	out.Reset()
	if printReset(&out, nil, "192.0.2.11"); out.Len() > 0 {
		t.Errorf("output for a cluster with one replica: %s", &out)
	}
}
