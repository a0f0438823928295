package install

import (
	"errors"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
)

// systemd accepts the units: it reports no unknown or invalid setting.
func TestSystemdKnowsTheUnits(t *testing.T) {
	analyze, err := exec.LookPath("systemd-analyze")
	if err != nil {
		t.Skip("there is no systemd-analyze")
	}
	dir := t.TempDir()
	for _, unit := range []string{"keelson-agent.service", "keelson-controlplane.service", "keelson-pods.service",
		"keelson.slice"} {
		raw, err := os.ReadFile(unit)
		if err != nil {
			t.Fatal(err)
		}
		// It looks for the programs, which are not installed here.
		text := strings.ReplaceAll(strings.ReplaceAll(string(raw), "/usr/bin/keelson-", "/bin/true "),
			"/sbin/modprobe", "/bin/true")
		if err := os.WriteFile(filepath.Join(dir, unit), []byte(text), 0o644); err != nil {
			t.Fatal(err)
		}
	}
	verify := func(units ...string) (string, error) {
		for i, u := range units {
			units[i] = filepath.Join(dir, u)
		}
		out, err := exec.Command(analyze, append([]string{"verify", "--man=no", "--recursive-errors=no"}, units...)...).
			CombinedOutput()
		return string(out), err
	}
	if out, err := verify("keelson-agent.service", "keelson-controlplane.service", "keelson-pods.service",
		"keelson.slice"); err != nil || strings.Contains(out, dir) {
		t.Errorf("%v\n%s", err, out)
	}
	bad := "[Service]\nExecStart=/bin/true\nKilMode=process\n"
	if err := os.WriteFile(filepath.Join(dir, "bad.service"), []byte(bad), 0o644); err != nil {
		t.Fatal(err)
	}
	if out, err := verify("bad.service"); err == nil && !strings.Contains(out, "KilMode") {
		t.Error("a misspelt unit is taken for a good one")
	}
}

// A stopped agent leaves pods alone, and they inherit nothing that limits them.
func TestUnitsSayWhatMustBe(t *testing.T) {
	for unit, lines := range map[string][]string{
		"keelson-agent.service": {"KillMode=process", "Delegate=yes", "Slice=keelson.slice", "Restart=always",
			"OOMScoreAdjust=-999", "LimitNOFILE=1048576", "TasksMax=infinity",
			"Wants=network-online.target keelson-pods.service",
			"RequiresMountsFor=/var/lib/keelson /var/lib/keelson/local-volumes /var/lib/keelson/images"},
		// A machine that goes down ends the agent first, then pods.
		"keelson-pods.service": {"Before=keelson-agent.service", "RemainAfterExit=yes",
			"ExecStop=/usr/bin/keelson-agent end-pods", "TimeoutStopSec=60",
			"RequiresMountsFor=/var/lib/keelson /var/lib/keelson/local-volumes /var/lib/keelson/images"},
		"keelson-controlplane.service": {"Restart=always", "OOMScoreAdjust=-999", "LimitNOFILE=1048576",
			"NoNewPrivileges=yes", "ProtectSystem=full",
			"RequiresMountsFor=/var/lib/keelson/controlplane"},
	} {
		raw, err := os.ReadFile(unit)
		if err != nil {
			t.Fatal(err)
		}
		for _, line := range lines {
			if !strings.Contains(string(raw), "\n"+line+"\n") {
				t.Errorf("%s: no %s", unit, line)
			}
		}
		for _, never := range []string{"NoNewPrivileges", "Protect", "Private", "Restrict", "SystemCall",
			"CapabilityBoundingSet"} {
			if unit == "keelson-agent.service" && strings.Contains(string(raw), "\n"+never) {
				t.Errorf("%s: %s would bind containers too, or hide the host's mounts from the agent", unit, never)
			}
		}
	}
}

// The installed example files are valid for the daemons.
func TestExamplesAreTaken(t *testing.T) {
	bin := os.Getenv("KEELSON_BIN")
	if bin == "" {
		bin = filepath.Join("..", "..", "bin")
	}
	for name, args := range map[string][]string{
		"agent": {"--config=agent.yaml", "--node-name=UPPER"}, // whatever is wrong otherwise is said later
		"controlplane": {"run", "--config=controlplane.yaml", "--store-quota=1Mi", "--name=x",
			"--advertise-address=127.0.0.1"},
	} {
		program := filepath.Join(bin, "keelson-"+name)
		if _, err := os.Stat(program); errors.Is(err, os.ErrNotExist) {
			t.Skip("the programs are not built")
		}
		out, err := exec.Command(program, args...).CombinedOutput()
		if err == nil || strings.Contains(string(out), ".yaml") {
			t.Errorf("%s: %v\n%s", name, err, out)
		}
	}
}
