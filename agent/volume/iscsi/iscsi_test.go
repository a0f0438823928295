package iscsi

import (
	"errors"
	"io/fs"
	"net/netip"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"keelson.dev/keelson/agent/volume/remote"
	"keelson.dev/keelson/internal/virtual"
)

func requireNoError(t *testing.T, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}

// The fields of a volume become a disk. Invalid ones are rejected before they are used as arguments
// or file names.
func TestNew(t *testing.T) {
	d, err := New("pv", "iqn.2026-01.example:disks", "192.0.2.1",
		[]string{"192.0.2.2:3261", "192.0.2.1:3260", "[2001:db8::1]:3260", "2001:db8::2"}, 7, "", "")
	requireNoError(t, err)
	if got := d.String(); got != "iSCSI target iqn.2026-01.example:disks at 192.0.2.1:3260, 192.0.2.2:3261, "+
		"[2001:db8::1]:3260, [2001:db8::2]:3260, LUN 7" || d.Interface != "default" {
		t.Errorf("%s by %s", got, d.Interface)
	}
	// Names that differ only in case denote one target (RFC 3722), with one folder and one record.
	if d, err = New("pv", "iqn.2026-01.Example:DISKS", "192.0.2.1", nil, 7, "", ""); err != nil ||
		d.Target != "iqn.2026-01.example:disks" {
		t.Errorf("%+v, %v", d, err)
	}
	d, err = New("pv", "eui.0123456789abcdef", "192.0.2.1:3260", nil, 0, "eth1", "iqn.2026-01.example:other")
	requireNoError(t, err)
	if d.Interface != "192.0.2.1:3260:pv" || d.Like != "eth1" || d.Initiator != "iqn.2026-01.example:other" {
		t.Errorf("%+v", d)
	}
	for _, c := range []struct{ target, portal, base, initiator, want string }{
		{"disks", "192.0.2.1", "", "", `"disks" is not a valid name of an iSCSI target`},
		{"iqn.2026-01.example:../../etc", "192.0.2.1", "", "", "is not a valid name of an iSCSI target"},
		{"iqn.2026-01.example:a b", "192.0.2.1", "", "", "is not a valid name of an iSCSI target"},
		{"--logoutall=all", "192.0.2.1", "", "", "is not a valid name of an iSCSI target"},
		{"iqn.2026-01.example:disks", "files.example.com", "", "", `portal "files.example.com" is not an IP address`},
		{"iqn.2026-01.example:disks", "192.0.2.1:99999", "", "", "is not an IP address"},
		{"iqn.2026-01.example:disks", "192.0.2.1", "-x", "", `"-x" is not a valid name of an iSCSI interface`},
		{"iqn.2026-01.example:disks", "192.0.2.1", "../x", "", "is not a valid name of an iSCSI interface"},
		{"iqn.2026-01.example:disks", "192.0.2.1", "", "me", `initiatorName "me" is not a valid name`},
	} {
		if _, err := New("pv", c.target, c.portal, nil, 0, c.base, c.initiator); err == nil ||
			!strings.Contains(err.Error(), c.want) {
			t.Errorf("%+v: %v", c, err)
		}
	}
	if _, err := New(strings.Repeat("v", 60), "iqn.2026-01.example:disks", "192.0.2.1", nil, 0, "",
		"iqn.2026-01.example:other"); err == nil || !strings.Contains(err.Error(), "maximum is 64 characters") {
		t.Errorf("a long name: %v", err)
	}
	if _, err := New("pv", "iqn.2026-01.example:disks", "192.0.2.1", nil, 256, "", ""); err == nil {
		t.Error("LUN 256 is taken")
	}
}

// Records are edited line by line. A value that is not a single line is rejected, because it could
// add a setting.
func TestEdit(t *testing.T) {
	const record = "# BEGIN RECORD 2.1.8\nnode.name = iqn.x\nnode.session.auth.authmethod = " +
		"None\nnode.session.auth.username = old\n# END RECORD\n"
	got, err := editRecord([]byte(record), append(chapSettings("node.session.auth.",
		Credentials{User: "user", Password: "a = b"}), setting{"node.startup", "manual"}))
	requireNoError(t, err)
	if want := "# BEGIN RECORD 2.1.8\nnode.name = iqn.x\nnode.session.auth.authmethod = " +
		"CHAP\nnode.session.auth.username = user\nnode.session.auth.password = a = b\nnode.startup = manual\n# END " +
		"RECORD\n"; string(got) != want {
		t.Errorf("%q", got)
	}
	for _, bad := range []string{"a\nnode.startup = automatic", "", " a", "a\x00"} {
		if _, err := editRecord([]byte(record), []setting{{"node.session.auth.password", bad}}); err == nil ||
			strings.Contains(err.Error(), "automatic") {
			t.Errorf("%q: %v", bad, err)
		}
	}
	if _, err := editRecord([]byte("anything"), nil); err == nil {
		t.Error("what is no record is changed")
	}
	defer func(was []string) { recordRoots = was }(recordRoots)
	recordRoots = []string{filepath.Join(t.TempDir(), "absent"), t.TempDir()}
	portal := netip.MustParseAddrPort("[2001:db8::1]:3260")
	file := filepath.Join(recordRoots[1], "nodes/iqn.x/2001:db8::1,3260,2/default")
	requireNoError(t, errors.Join(os.MkdirAll(filepath.Dir(file), 0o700), os.WriteFile(file, []byte(record), 0o600)))
	if found, err := nodeRecord("iqn.x", portal, 2, "default"); found != file || err != nil {
		t.Errorf("%q, %v", found, err)
	}
	if found, err := nodeRecord("iqn.x", portal, 1, "default"); found != "" || err != nil {
		t.Errorf("%q, %v", found, err)
	}
	requireNoError(t, changeRecord(file, []setting{{"node.session.auth.password", "secret"}}))
	st, err := os.Stat(file)
	if b, rerr := os.ReadFile(file); err != nil || rerr != nil || st.Mode().Perm() != 0o600 ||
		!strings.Contains(string(b), "password = secret") {
		t.Errorf("%v, %v: %s", err, rerr, b)
	}
	if left, _ := filepath.Glob(filepath.Join(filepath.Dir(file), "*")); len(left) != 1 {
		t.Errorf("files beside the record: %q", left)
	}
}

// The output of discovery is parsed, and other lines are ignored. The login uses the target's name
// as written by its portal.
func TestOffers(t *testing.T) {
	all := parseOffers([]byte("192.0.2.1:3260,1 iqn.A\n[2001:db8::1]:3260,2 iqn.A\n192.0.2.9:3260,3 " +
		"iqn.b\nnoise\n1,2\n"))
	if len(all) != 3 {
		t.Fatalf("%v", all)
	}
	for portal, want := range map[string]int{"192.0.2.1:3260": 1, "[2001:db8::1]:3260": 2, "198.51.100.1:3260": 1} {
		if o, ok := findOffer(all, "iqn.a", netip.MustParseAddrPort(portal)); !ok || o.group != want ||
			o.target != "iqn.A" {
			t.Errorf("%s: %v, %t", portal, o, ok)
		}
	}
	if _, ok := findOffer(all, "iqn.c", netip.MustParseAddrPort("192.0.2.1:3260")); ok {
		t.Error("a target that nobody offers")
	}
}

// newFakeKernel returns a fake /sys with a session and two units, of which one is part of a
// multipath device.
func newFakeKernel(t *testing.T) Kernel {
	k := Kernel{Sys: t.TempDir(), Dev: t.TempDir()}
	target := "devices/platform/host3/session1/target3:0:0"
	for file, text := range map[string]string{
		"devices/platform/host3/session1/iscsi_session/session1/targetname":                               "iqn.A",
		"devices/platform/host3/session1/iscsi_session/session1/ifacename":                                "default",
		"devices/platform/host3/session1/iscsi_session/session1/state":                                    "LOGGED_IN",
		"devices/platform/host3/session1/iscsi_session/session1/target_id":                                "0",
		"devices/platform/host3/session1/connection1:0/iscsi_connection/connection1:0/persistent_address": "2001:db8::1",
		"devices/platform/host3/session1/connection1:0/iscsi_connection/connection1:0/persistent_port":    "3260",
		target + "/3:0:0:0/block/sda/dev":                                                                 "8:0",
		target + "/3:0:0:0/block/sda/sda1/dev":                                                            "8:1",
		target + "/3:0:0:0/wwid":                                                                          "naa.1",
		target + "/3:0:0:12/block/sdb/dev":                                                                "8:16",
		target + "/3:0:0:12/block/sdb/holders/dm-0/dev":                                                   "253:0",
		target + "/3:0:0:5/type":                                                                          "12",
		"block/dm-0/dm/uuid":                                                                              "mpath-3600",
	} {
		file = filepath.Join(k.Sys, file)
		requireNoError(t, errors.Join(os.MkdirAll(filepath.Dir(file), 0o755),
			os.WriteFile(file, []byte(text+"\n"), 0o644)))
	}
	session := filepath.Join(k.Sys, "devices/platform/host3/session1/iscsi_session/session1")
	requireNoError(t, errors.Join(os.MkdirAll(filepath.Join(k.Sys, "class/iscsi_session"), 0o755),
		os.MkdirAll(filepath.Join(k.Sys, "class/iscsi_connection"), 0o755),
		os.Symlink(session, filepath.Join(k.Sys, "class/iscsi_session/session1")),
		os.Symlink("../..", filepath.Join(session, "device")),
		os.Symlink(filepath.Join(k.Sys, "devices/platform/host3/session1/connection1:0/iscsi_connection/connection1:0"),
			filepath.Join(k.Sys, "class/iscsi_connection/connection1:0"))))
	for _, dev := range []string{"sda", "sdb", "dm-0"} {
		requireNoError(t, os.WriteFile(filepath.Join(k.Dev, dev), nil, 0o600))
	}
	return k
}

// Sessions and devices are read from the kernel, in any case of the target's name. A multipath
// device is preferred.
func TestKernel(t *testing.T) {
	k := newFakeKernel(t)
	all, err := k.Sessions()
	requireNoError(t, err)
	if len(all) != 1 || all[0].Target != "iqn.A" || all[0].Portal != netip.MustParseAddrPort("[2001:db8::1]:3260") ||
		!all[0].Up || all[0].host != "3" {
		t.Fatalf("%+v", all)
	}
	n := Node{Kernel: k}
	for lun, want := range map[int]string{0: "sda", 12: "dm-0", 5: "", 1: ""} {
		d := Disk{Target: "iqn.a", Interface: "default",
			Portals: []netip.AddrPort{netip.MustParseAddrPort("192.0.2.1:3260"), all[0].Portal}, LUN: lun}
		device, err := n.Device(d)
		if want != "" {
			want = filepath.Join(k.Dev, want)
		}
		if device != want || err != nil {
			t.Errorf("LUN %d: %q, %v, want %q", lun, device, err, want)
		}
		d.Interface = "other"
		if device, err := n.Device(d); device != "" || err != nil {
			t.Errorf("LUN %d by another interface: %q, %v", lun, device, err)
		}
	}
	units, err := k.Units(all[0])
	requireNoError(t, err)
	var numbers []string
	for _, u := range units {
		numbers = append(numbers, k.deviceNumbers(u)...)
	}
	slices.Sort(numbers)
	if got := strings.Join(numbers, " "); got != "253:0 8:0 8:1 8:16" {
		t.Errorf("what may be mounted: %s", got)
	}
	if all, err := (Kernel{Sys: t.TempDir()}).Sessions(); len(all) > 0 || err != nil {
		t.Errorf("without an initiator: %v, %v", all, err)
	}
}

// A session may end while its attributes are read. It is then treated as not listed. The test uses
// files of cgroups, which vanish like those of sessions.
func TestAttributeOfWhatHasGone(t *testing.T) { // F110
	dir := ""
	for _, parent := range []string{"/sys/fs/cgroup", "/sys/fs/cgroup/pids", "/sys/fs/cgroup/cpu",
		"/sys/fs/cgroup/systemd"} {
		d, err := os.MkdirTemp(parent, "keelson-gone-")
		if err != nil {
			continue
		}
		t.Cleanup(func() { os.Remove(d) })
		if _, err := os.Stat(filepath.Join(d, "cgroup.procs")); err == nil {
			dir = d
			break
		}
	}
	if dir == "" {
		t.Skip("needs root, and a hierarchy of cgroups that may be written to")
	}
	f, err := os.Open(filepath.Join(dir, "cgroup.procs"))
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	if err := os.Remove(dir); err != nil {
		t.Fatal(err)
	}
	if got, err := readOpenAttribute(f); !errors.Is(err, fs.ErrNotExist) {
		t.Errorf("read %q, %v", got, err)
	}
}

// State persists on disk. Fields of a later release are ignored.
func TestState(t *testing.T) {
	dir := t.TempDir()
	s, err := loadState(dir)
	requireNoError(t, err)
	now := time.Now().Truncate(time.Second)
	s.Target, s.Interface, s.Portals["192.0.2.1:3260"] = "iqn.a", "default",
		PortalState{Group: 1, MadeRecord: true, Asked: &now}
	requireNoError(t, s.saveTo(dir))
	file := filepath.Join(dir, stateFile)
	b, err := os.ReadFile(file)
	requireNoError(t, err)
	requireNoError(t, os.WriteFile(file, []byte(strings.Replace(string(b), "{", `{"later":1,`, 1)), 0o600))
	again, err := loadState(dir)
	requireNoError(t, err)
	if p := again.parsedPortals()[netip.MustParseAddrPort("192.0.2.1:3260")]; again.Target != "iqn.a" || p.Group != 1 ||
		!p.MadeRecord || !p.Asked.Equal(now) {
		t.Errorf("%+v", again)
	}
	// A pending login is waited for. iscsiadm is not called meanwhile.
	t.Setenv("PATH", t.TempDir())
	n := Node{Kernel: Kernel{Sys: t.TempDir(), Dev: t.TempDir()}}
	if err := n.Detach(t.Context(), dir, 0, true); err == nil ||
		!strings.Contains(err.Error(), "iscsid may be logging in at portal 192.0.2.1:3260: it gives up") {
		t.Errorf("%v", err)
	}
	requireNoError(t, os.WriteFile(file, []byte("torn"), 0o600))
	if err := n.Detach(t.Context(), dir, 0, true); err == nil {
		t.Error("a state that cannot be read is taken for none")
	}
}

// A node that leaves waits for a pending login, because nobody could remove its session later.
func TestLateLoginsAreWaitedFor(t *testing.T) {
	t.Setenv("PATH", t.TempDir())
	n := Node{Kernel: Kernel{Sys: t.TempDir(), Dev: t.TempDir()}}
	root := t.TempDir()
	dir := filepath.Join(root, FolderName(Disk{Target: "iqn.a", Interface: "default"}))
	requireNoError(t, os.MkdirAll(dir, 0o755))
	virtual.Test(t, func(t *testing.T) {
		began := time.Now()
		requireNoError(t,
			State{Version: 1, Target: "iqn.a", Interface: "default",
				Portals: map[string]PortalState{"192.0.2.1:3260": {Group: 1, Asked: &began}}}.saveTo(dir))
		requireNoError(t, n.DetachAll(t.Context(), root))
		if took := time.Since(began); took < loginPending {
			t.Errorf("it was waited for %s, want %s", took, loginPending)
		}
	})
	if left, _ := os.ReadDir(dir); len(left) > 0 {
		t.Errorf("%v is left", left)
	}
}

// Each exit status of iscsiadm has an explanation with the remedy, and the original error.
func TestExplain(t *testing.T) {
	for code, want := range map[int]string{24: "authentication failed", 20: "iscsid does not run on this node",
		12: "load module iscsi_tcp", 8: "did not answer within 30s",
		4: "does not reach portal", 19: "refused the login", 7: "asking: iscsiadm: words"} {
		err := explainError(&remote.ExitError{Program: "iscsiadm", Code: code, Output: "words"}, "asking",
			netip.MustParseAddrPort("192.0.2.1:3260"), 30*time.Second)
		if !strings.Contains(err.Error(), want) || !strings.Contains(err.Error(), "words") {
			t.Errorf("%d: %v, want %q", code, err, want)
		}
	}
	if got := shortenOutput("iscsiadm: a\niscsiadm: a\n\nb\n"); got != "a; b" {
		t.Errorf("%q", got)
	}
}
