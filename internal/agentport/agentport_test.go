package agentport

import (
	"fmt"
	"os"
	"strings"
	"testing"
)

// The ports are the same as the constants in the agent's code.
func TestPortsOfTheAgent(t *testing.T) {
	for path, want := range map[string]string{
		"agent/node/config.go":     fmt.Sprintf("c.Listen.KubeletPort = %d\n", HTTPS),
		"agent/network/plan.go":    fmt.Sprintf("tunnelPort = %d ", VXLAN),
		"agent/network/encrypt.go": fmt.Sprintf("DefaultWireGuardPort = %d\n", WireGuard),
	} {
		raw, err := os.ReadFile("../../" + path)
		if err != nil {
			t.Fatal(err)
		}
		if !strings.Contains(string(raw), want) {
			t.Errorf("%s does not contain %q", path, want)
		}
	}
}
