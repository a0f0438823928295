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

// leaving is a node with sessions that are folders as the kernel has them, and an iscsiadm that ends them.
type leaving struct {
	*testing.T
	kubelet, bin string
	kernel       iscsi.Kernel
	log          string
}

func newLeaving(t *testing.T) *leaving {
	n := &leaving{T: t, kubelet: t.TempDir(), bin: t.TempDir(), kernel: iscsi.Kernel{Sys: t.TempDir(), Dev: t.TempDir()}, log: filepath.Join(t.TempDir(), "log")}
	// A session's folder has the name of its target, which is behind -T.
	n.put(filepath.Join(n.bin, "iscsiadm"), fmt.Sprintf(`#!/bin/sh
echo "$*" >>%s
case "$*" in
*--logout*) [ ! -e %[2]s/fails-$4 ] || { echo "iscsiadm: no answer" >&2; exit 10; }; rm -r %[2]s/class/iscsi_session/session-$4 ;;
esac
`, n.log, n.kernel.Sys), 0o755)
	t.Setenv("PATH", n.bin+":"+os.Getenv("PATH"))
	return n
}

func (n *leaving) put(file, text string, mode os.FileMode) {
	n.Helper()
	must(n.T, errors.Join(os.MkdirAll(filepath.Dir(file), 0o755), os.WriteFile(file, []byte(text), mode)))
}

// session is one with a target at a portal, that has a device. How the device is told to go is in the file that is returned.
func (n *leaving) session(target, portal string) (removed string) {
	n.Helper()
	id := "-" + target
	dir := filepath.Join(n.kernel.Sys, "class/iscsi_session/session"+id)
	device := filepath.Join(n.kernel.Sys, "devices/host3/device"+id)
	unit := filepath.Join(device, "target3:0:0/3:0:0:0")
	for file, text := range map[string]string{
		filepath.Join(dir, "targetname"): target, filepath.Join(dir, "ifacename"): "default", filepath.Join(dir, "state"): "LOGGED_IN", filepath.Join(dir, "target_id"): "0",
		filepath.Join(unit, "block/sda/dev"): "9999:1", filepath.Join(unit, "delete"): "",
		filepath.Join(n.kernel.Sys, "class/iscsi_connection/connection"+id+":0/persistent_address"): portal,
		filepath.Join(n.kernel.Sys, "class/iscsi_connection/connection"+id+":0/persistent_port"):    "3260",
	} {
		n.put(file, text, 0o600)
	}
	must(n.T, os.Symlink(device, filepath.Join(dir, "device")))
	return filepath.Join(unit, "delete")
}

// state is what is noted of a target, by a release that notes more than this one knows.
func (n *leaving) state(target, portals string) (file string) {
	n.Helper()
	file = filepath.Join(n.kubelet, "plugins/kubernetes.io/iscsi/default", target, "target.json")
	n.put(file, fmt.Sprintf(`{"version":1,"later":true,"target":%q,"interface":"default","portals":{%s}}`, target, portals), 0o600)
	return file
}

// asked is what iscsiadm was asked since the last time.
func (n *leaving) asked() string {
	b, err := os.ReadFile(n.log)
	if err != nil && !errors.Is(err, os.ErrNotExist) {
		n.Error(err)
	}
	must(n.T, os.RemoveAll(n.log))
	return string(b)
}

func (n *leaving) remove() error {
	return Remove(n.Context(), n.kubelet, iscsi.Node{Kernel: n.kernel})
}

// A node that leaves its cluster ends the sessions that volumes have made, and forgets their records; it asks no more of sessions and
// records of others. What fails keeps nothing else from going, and is done when it is asked again. F110
func TestTargetsOfANodeThatLeaves(t *testing.T) {
	n := newLeaving(t)
	const one, other, foreign, before = "iqn.2026-01.example:one", "iqn.2026-01.example:other", "iqn.2026-01.example:foreign", "iqn.2026-01.example:before"
	const made = `"192.0.2.1:3260":{"group":1,"madeRecord":true}`
	devices := map[string]string{}
	for _, target := range []string{one, other, foreign, before} {
		devices[target] = n.session(target, "192.0.2.1")
	}
	notes := map[string]string{one: n.state(one, made), other: n.state(other, made), before: n.state(before, "")}
	torn := n.state("iqn.2026-01.example:torn", "")
	n.put(torn, "torn", 0o600)
	n.put(filepath.Join(n.kubelet, "plugins/kubernetes.io/iscsi/iface-default/of kubelet/iscsi.json"), "{}", 0o600)
	n.put(filepath.Join(n.kernel.Sys, "fails-"+other), "", 0o600)

	err := n.remove()
	for _, want := range []string{"taking iSCSI target " + other + " away: logging out at portal 192.0.2.1:3260", "no answer", torn} {
		if err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%v, want %s", err, want)
		}
	}
	if err != nil && (strings.Contains(err.Error(), one) || strings.Contains(err.Error(), foreign)) {
		t.Errorf("%v names what has not failed", err)
	}
	asked := n.asked()
	if want := "-m node -T " + one + " -p 192.0.2.1:3260,1 -I default --logout\n-m node -T " + one + " -p 192.0.2.1:3260,1 -I default -o delete\n"; !strings.Contains(asked, want) ||
		strings.Contains(asked, foreign) || strings.Contains(asked, before) || strings.Contains(asked, "-T "+other+" -p 192.0.2.1:3260,1 -I default -o delete") {
		t.Errorf("iscsiadm was asked\n%swant\n%s, and nothing of others", asked, want)
	}
	for target, want := range map[string]string{one: "1", other: "1", foreign: "", before: ""} {
		if got := read(t, devices[target]); got != want {
			t.Errorf("the device of %s was told %q, want %q", target, got, want)
		}
	}
	for target, want := range map[string]bool{one: false, other: true, before: false} {
		if exists(notes[target]) != want {
			t.Errorf("what is noted of %s is there: %v, want %v", target, !want, want)
		}
	}

	must(t, errors.Join(os.Remove(filepath.Join(n.kernel.Sys, "fails-"+other)), os.Remove(torn)))
	if err := n.remove(); err != nil || exists(notes[other]) || !strings.Contains(n.asked(), "-T "+other+" -p 192.0.2.1:3260,1 -I default -o delete") {
		t.Errorf("asked again: %v", err)
	}
	if err := n.remove(); err != nil || n.asked() != "" {
		t.Errorf("asked where nothing is left: %v", err)
	}
}

// Without iscsiadm what was made by it is named, and the note of it kept; where nothing was made nobody misses it. F110
func TestNodesThatLeaveWithoutHelpers(t *testing.T) {
	n := newLeaving(t)
	t.Setenv("PATH", t.TempDir())
	if err := n.remove(); err != nil {
		t.Errorf("without any target: %v", err)
	}
	if note := n.state("iqn.2026-01.example:begun", ""); n.remove() != nil || exists(note) {
		t.Error("of a target that was never reached something is left")
	}
	note := n.state("iqn.2026-01.example:one", `"192.0.2.1:3260":{"group":1,"madeRecord":true}`)
	if err := n.remove(); err == nil || !strings.Contains(err.Error(), "iqn.2026-01.example:one") || !strings.Contains(err.Error(), "iscsiadm is not on this node: install open-iscsi") || !exists(note) {
		t.Errorf("with a record: %v", err)
	}
}
