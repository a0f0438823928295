//go:build linux

// Package iscsitest has the kernel be an iSCSI target, and iscsid run, for tests. It takes a machine of its own, as test/qemuguest
// makes one: targets, sessions and devices are seen by all of a machine, and the kernel has them in its first network
// namespace alone.
package iscsitest

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"keelson.dev/keelson/internal/wait"
)

// Needed is set where the kernel can be a target and open-iscsi is there, so that the tests which need it are not skipped.
const Needed = "KEELSON_NEEDS_ISCSI"

// Need skips a test anywhere else.
func Need(t testing.TB) {
	t.Helper()
	if os.Getenv(Needed) == "" {
		t.Skip("needs: a machine of its own, whose kernel is an iSCSI target: TestGuest of test/qemuguest makes one")
	}
}

// Initiator is the name of this machine's.
const Initiator = "iqn.2026-01.example:initiator"

const configfs = "/sys/kernel/config"

// daemon is iscsid, one for all tests of a process: a second one would take the first one's sessions over.
var daemon = sync.OnceValue(func() error {
	if err := unix.Mount("configfs", configfs, "configfs", 0, ""); err != nil && !errors.Is(err, unix.EBUSY) {
		return fmt.Errorf("mounting configfs: %w", err)
	}
	for file, text := range map[string]string{
		"initiatorname.iscsi": "InitiatorName=" + Initiator + "\n",
		// What distributions have, but for shorter waits for a portal that is gone.
		"iscsid.conf": "node.startup = manual\nnode.leading_login = No\nnode.session.timeo.replacement_timeout = 20\nnode.conn[0].timeo.login_timeout = 15\n" +
			"node.conn[0].timeo.logout_timeout = 5\nnode.conn[0].timeo.noop_out_interval = 2\nnode.conn[0].timeo.noop_out_timeout = 3\n" +
			"discovery.sendtargets.reopen_max = 1\nnode.session.initial_login_retry_max = 8\nnode.session.scan = auto\nnode.session.iscsi.FastAbort = Yes\n",
	} {
		if err := errors.Join(os.MkdirAll("/etc/iscsi", 0o755), os.WriteFile(filepath.Join("/etc/iscsi", file), []byte(text), 0o600)); err != nil {
			return err
		}
	}
	if err := os.MkdirAll("/run/lock/iscsi", 0o700); err != nil {
		return err
	}
	cmd := exec.Command("iscsid", "-f")
	cmd.SysProcAttr = &syscall.SysProcAttr{Pdeathsig: syscall.SIGKILL}
	cmd.Stderr = os.Stderr
	return cmd.Start()
})

// Target is one with disks, at portals of this machine, until the end of the test.
type Target struct {
	t       testing.TB
	Name    string
	group   string // its folder of portals
	disks   map[int]string
	folder  string // of the disks' files
	portals []string
}

// Serve makes a target which lets everybody in. Portals are ADDRESS:PORT.
func Serve(t testing.TB, name string, portals ...string) *Target {
	t.Helper()
	Need(t)
	if err := daemon(); err != nil {
		t.Fatal(err)
	}
	s := &Target{t: t, Name: name, disks: map[int]string{}, folder: t.TempDir(), portals: portals,
		group: filepath.Join(configfs, "target/iscsi", name, "tpgt_1")}
	s.make(s.group)
	t.Cleanup(s.remove)
	for _, p := range portals {
		s.make(filepath.Join(s.group, "np", p))
	}
	for setting, v := range map[string]string{"authentication": "0", "generate_node_acls": "1", "demo_mode_write_protect": "0", "cache_dynamic_acls": "1"} {
		s.set(filepath.Join("attrib", setting), v)
	}
	s.Enable(true)
	return s
}

// Disk adds one of a size in bytes. Its bytes are in the file that is returned.
func (s *Target) Disk(lun int, size int64) (file string) {
	s.t.Helper()
	store := fmt.Sprintf("%s-%d", strings.NewReplacer(":", "-", ".", "-").Replace(s.Name), lun)
	file = filepath.Join(s.folder, store)
	if err := errors.Join(os.WriteFile(file, nil, 0o600), os.Truncate(file, size)); err != nil {
		s.t.Fatal(err)
	}
	at := filepath.Join(configfs, "target/core/fileio_0", store)
	s.make(at)
	s.write(filepath.Join(at, "control"), fmt.Sprintf("fd_dev_name=%s,fd_dev_size=%d", file, size))
	s.write(filepath.Join(at, "enable"), "1")
	unit := filepath.Join(s.group, "lun", fmt.Sprintf("lun_%d", lun))
	s.make(unit)
	if err := os.Symlink(at, filepath.Join(unit, "disk")); err != nil {
		s.t.Fatal(err)
	}
	s.disks[lun] = at
	return file
}

// Enable says whether the target lets anybody in. Who is in is put out.
func (s *Target) Enable(on bool) {
	s.t.Helper()
	value := "0"
	if on {
		value = "1"
	}
	s.set("enable", value)
}

// Authenticate wants a user name and a password of everybody, and proves another pair to them.
func (s *Target) Authenticate(user, password, userIn, passwordIn string) {
	s.t.Helper()
	s.set("attrib/authentication", "1")
	s.set("param/AuthMethod", "CHAP")
	for name, v := range map[string]string{"userid": user, "password": password, "userid_mutual": userIn, "password_mutual": passwordIn} {
		s.set(filepath.Join("auth", name), v)
	}
}

// AuthenticateDiscovery wants a user name and a password of whoever asks for targets, of which it is no longer after the test.
func (s *Target) AuthenticateDiscovery(user, password string) {
	s.t.Helper()
	at := filepath.Join(configfs, "target/iscsi/discovery_auth")
	s.write(filepath.Join(at, "userid"), user)
	s.write(filepath.Join(at, "password"), password)
	s.write(filepath.Join(at, "enforce_discovery_auth"), "1")
	s.t.Cleanup(func() { s.write(filepath.Join(at, "enforce_discovery_auth"), "0") })
}

func (s *Target) make(dir string) {
	s.t.Helper()
	if err := os.MkdirAll(dir, 0o755); err != nil {
		s.t.Fatal(err)
	}
}

func (s *Target) set(name, value string) {
	s.t.Helper()
	s.write(filepath.Join(s.group, name), value)
}

func (s *Target) write(file, text string) {
	s.t.Helper()
	f, err := os.OpenFile(file, os.O_WRONLY, 0)
	if err == nil {
		_, err = f.WriteString(text)
		err = errors.Join(err, f.Close())
	}
	if err != nil {
		s.t.Fatalf("telling the kernel's iSCSI target %q: %v", text, err)
	}
}

// remove takes the target away, whoever is in.
func (s *Target) remove() {
	errs := []error{os.WriteFile(filepath.Join(s.group, "enable"), []byte("0"), 0)}
	for lun, store := range s.disks {
		unit := filepath.Join(s.group, "lun", fmt.Sprintf("lun_%d", lun))
		errs = append(errs, os.Remove(filepath.Join(unit, "disk")), unix.Rmdir(unit), unix.Rmdir(store))
	}
	for _, p := range s.portals {
		errs = append(errs, unix.Rmdir(filepath.Join(s.group, "np", p)))
	}
	errs = append(errs, unix.Rmdir(s.group), unix.Rmdir(filepath.Dir(s.group)))
	if err := errors.Join(errs...); err != nil {
		s.t.Errorf("taking the target away: %v", err)
	}
}

// Sessions are the names of those that the kernel's initiator has.
func Sessions(t testing.TB) []string {
	t.Helper()
	entries, err := os.ReadDir("/sys/class/iscsi_session")
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		t.Fatal(err)
	}
	var names []string
	for _, e := range entries {
		names = append(names, e.Name())
	}
	return names
}

// Admin runs iscsiadm, as somebody who looks after the node does.
func Admin(t testing.TB, args ...string) {
	t.Helper()
	if out, err := exec.CommandContext(t.Context(), "iscsiadm", args...).CombinedOutput(); err != nil {
		t.Fatalf("iscsiadm %q: %v: %s", args, err, out)
	}
}

// Records are the files of iscsiadm's records of targets, interfaces and portals.
func Records(t testing.TB) []string {
	t.Helper()
	var files []string
	for _, dir := range []string{"nodes", "send_targets", "ifaces", "static"} {
		err := filepath.WalkDir(filepath.Join("/etc/iscsi", dir), func(p string, d fs.DirEntry, err error) error {
			if err == nil && d.Type().IsRegular() && filepath.Base(p) != "iface.example" {
				files = append(files, p)
			}
			if errors.Is(err, fs.ErrNotExist) {
				return nil
			}
			return err
		})
		if err != nil {
			t.Fatal(err)
		}
	}
	return files
}

// Kills is set to a part of the arguments of iscsiadm, by which a process that calls it with such is killed when it has done
// what it was asked.
const Kills = "KEELSON_TEST_KILLS"

// Arguments has what iscsiadm is called with from now on written down, and returns how to read it.
func Arguments(t *testing.T) (read func() string) {
	t.Helper()
	real, err := exec.LookPath("iscsiadm")
	if err != nil {
		t.Fatal(err)
	}
	dir := t.TempDir()
	log := filepath.Join(dir, "log")
	script := fmt.Sprintf("#!/bin/sh\necho \"$@\" >> %s\n%s \"$@\"\ncode=$?\ncase \"$*\" in *\"${%s:-never}\"*) kill -9 $PPID ;; esac\nexit $code\n", log, real, Kills)
	if err := os.WriteFile(filepath.Join(dir, "iscsiadm"), []byte(script), 0o700); err != nil {
		t.Fatal(err)
	}
	t.Setenv("PATH", dir+":"+os.Getenv("PATH"))
	return func() string {
		b, err := os.ReadFile(log)
		if err != nil {
			t.Error(err)
		}
		return string(b)
	}
}

// Cut has no packet come to a portal or from it, until it is mended.
func Cut(t testing.TB, address string) (mend func()) {
	t.Helper()
	nft := func(text string) {
		t.Helper()
		if out, err := exec.Command("nft", text).CombinedOutput(); err != nil {
			t.Fatalf("nft: %v: %s", err, out)
		}
	}
	nft("table inet cut {\nchain input {\ntype filter hook input priority 0; ip daddr " + address + " tcp dport 3260 drop; ip saddr " + address + " tcp sport 3260 drop\n}\n}")
	return func() { nft("delete table inet cut") }
}

// Until waits for a condition.
func Until(t testing.TB, cond func() error) {
	t.Helper()
	if err := wait.For(t.Context(), 100*time.Millisecond, cond); err != nil {
		t.Fatal(err)
	}
}
