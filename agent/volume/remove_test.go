package volume

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"keelson.dev/keelson/agent/volume/iscsi"
)

// leavingNode is a node with simulated sessions (folders as in /sys) and a simulated iscsiadm that
// ends them.
type leavingNode struct {
	*testing.T
	kubelet, bin string
	kernel       iscsi.Kernel
	log          string
}

func newLeaving(t *testing.T) *leavingNode {
	n := &leavingNode{T: t, kubelet: t.TempDir(), bin: t.TempDir(),
		kernel: iscsi.Kernel{Sys: t.TempDir(), Dev: t.TempDir()}, log: filepath.Join(t.TempDir(), "log")}
	// The folder of a session has the target's name, which follows -T.
	n.writeFile(filepath.Join(n.bin, "iscsiadm"), fmt.Sprintf(`#!/bin/sh
echo "$*" >>%s
case "$*" in
*--logout*) [ ! -e %[2]s/fails-$4 ] || { echo "iscsiadm: no answer" >&2; exit 10; }; rm -r %[2]s/class/iscsi_session/session-$4 ;;
esac
`, n.log, n.kernel.Sys), 0o755)
	t.Setenv("PATH", n.bin+":"+os.Getenv("PATH"))
	return n
}

func (n *leavingNode) writeFile(file, text string, mode os.FileMode) {
	n.Helper()
	requireNoError(n.T, errors.Join(os.MkdirAll(filepath.Dir(file), 0o755), os.WriteFile(file, []byte(text), mode)))
}

// addSession adds a session with a target at a portal, with a device. It returns the file to which
// the removal of the device is written.
func (n *leavingNode) addSession(target, portal string) (removed string) {
	n.Helper()
	id := "-" + target
	dir := filepath.Join(n.kernel.Sys, "class/iscsi_session/session"+id)
	device := filepath.Join(n.kernel.Sys, "devices/host3/device"+id)
	unit := filepath.Join(device, "target3:0:0/3:0:0:0")
	for file, text := range map[string]string{
		filepath.Join(dir, "targetname"): target, filepath.Join(dir, "ifacename"): "default",
		filepath.Join(dir, "state"): "LOGGED_IN", filepath.Join(dir, "target_id"): "0",
		filepath.Join(unit, "block/sda/dev"): "9999:1", filepath.Join(unit, "delete"): "",
		filepath.Join(n.kernel.Sys, "class/iscsi_connection/connection"+id+":0/persistent_address"): portal,
		filepath.Join(n.kernel.Sys, "class/iscsi_connection/connection"+id+":0/persistent_port"):    "3260",
	} {
		n.writeFile(file, text, 0o600)
	}
	requireNoError(n.T, os.Symlink(device, filepath.Join(dir, "device")))
	return filepath.Join(unit, "delete")
}

// writeState writes the state of a target, in the form of a later release with more fields.
func (n *leavingNode) writeState(target, portals string) (file string) {
	n.Helper()
	file = filepath.Join(n.kubelet, "plugins/kubernetes.io/iscsi/default", target, "target.json")
	n.writeFile(file, fmt.Sprintf(`{"version":1,"later":true,"target":%q,"interface":"default","portals":{%s}}`, target,
		portals), 0o600)
	return file
}

// adminCalls returns the calls of iscsiadm since the previous adminCalls.
func (n *leavingNode) adminCalls() string {
	b, err := os.ReadFile(n.log)
	if err != nil && !errors.Is(err, os.ErrNotExist) {
		n.Error(err)
	}
	requireNoError(n.T, os.RemoveAll(n.log))
	return string(b)
}

func (n *leavingNode) removeISCSI() error {
	return RemoveISCSI(n.Context(), n.kubelet, iscsi.Node{Kernel: n.kernel})
}

// A node that leaves its cluster ends the sessions that volumes created, and removes their records.
// It does not touch sessions and records of others. A failure does not prevent other removals, and
// is retried by the next call. F110
func TestTargetsOfANodeThatLeaves(t *testing.T) {
	n := newLeaving(t)
	const one, other, foreign, before = "iqn.2026-01.example:one", "iqn.2026-01.example:other",
		"iqn.2026-01.example:foreign", "iqn.2026-01.example:before"
	const made = `"192.0.2.1:3260":{"group":1,"madeRecord":true}`
	devices := map[string]string{}
	for _, target := range []string{one, other, foreign, before} {
		devices[target] = n.addSession(target, "192.0.2.1")
	}
	notes := map[string]string{one: n.writeState(one, made), other: n.writeState(other, made),
		before: n.writeState(before, "")}
	torn := n.writeState("iqn.2026-01.example:torn", "")
	n.writeFile(torn, "torn", 0o600)
	n.writeFile(filepath.Join(n.kubelet, "plugins/kubernetes.io/iscsi/iface-default/of kubelet/iscsi.json"), "{}",
		0o600)
	n.writeFile(filepath.Join(n.kernel.Sys, "fails-"+other), "", 0o600)

	err := n.removeISCSI()
	for _, want := range []string{"detaching iSCSI target " + other + ": logging out at portal 192.0.2.1:3260",
		"no answer", torn} {
		if err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%v, want %s", err, want)
		}
	}
	if err != nil && (strings.Contains(err.Error(), one) || strings.Contains(err.Error(), foreign)) {
		t.Errorf("%v names what has not failed", err)
	}
	asked := n.adminCalls()
	if want := "-m node -T " + one + " -p 192.0.2.1:3260,1 -I default --logout\n-m node -T " + one +
		" -p 192.0.2.1:3260,1 -I default -o delete\n"; !strings.Contains(asked, want) ||
		strings.Contains(asked, foreign) || strings.Contains(asked, before) ||
		strings.Contains(asked, "-T "+other+" -p 192.0.2.1:3260,1 -I default -o delete") {
		t.Errorf("iscsiadm was asked\n%swant\n%s, and nothing of others", asked, want)
	}
	for target, want := range map[string]string{one: "1", other: "1", foreign: "", before: ""} {
		if got := mustRead(t, devices[target]); got != want {
			t.Errorf("the device of %s was told %q, want %q", target, got, want)
		}
	}
	for target, want := range map[string]bool{one: false, other: true, before: false} {
		if fileExists(notes[target]) != want {
			t.Errorf("what is noted of %s is there: %v, want %v", target, !want, want)
		}
	}

	requireNoError(t, errors.Join(os.Remove(filepath.Join(n.kernel.Sys, "fails-"+other)), os.Remove(torn)))
	if err := n.removeISCSI(); err != nil || fileExists(notes[other]) ||
		!strings.Contains(n.adminCalls(), "-T "+other+" -p 192.0.2.1:3260,1 -I default -o delete") {
		t.Errorf("asked again: %v", err)
	}
	if err := n.removeISCSI(); err != nil || n.adminCalls() != "" {
		t.Errorf("asked where nothing is left: %v", err)
	}
}

// Without iscsiadm, the error names what it created, and the state is kept. If nothing was created,
// iscsiadm is not needed. F110
func TestNodesThatLeaveWithoutHelpers(t *testing.T) {
	n := newLeaving(t)
	t.Setenv("PATH", t.TempDir())
	if err := n.removeISCSI(); err != nil {
		t.Errorf("without any target: %v", err)
	}
	if note := n.writeState("iqn.2026-01.example:begun", ""); n.removeISCSI() != nil || fileExists(note) {
		t.Error("of a target that was never reached something is left")
	}
	note := n.writeState("iqn.2026-01.example:one", `"192.0.2.1:3260":{"group":1,"madeRecord":true}`)
	if err := n.removeISCSI(); err == nil || !strings.Contains(err.Error(), "iqn.2026-01.example:one") ||
		!strings.Contains(err.Error(), "iscsiadm is not on this node: install open-iscsi") || !fileExists(note) {
		t.Errorf("with a record: %v", err)
	}
}
