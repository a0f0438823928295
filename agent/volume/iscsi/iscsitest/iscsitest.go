//go:build linux

// Package iscsitest runs an iSCSI target of the kernel, and iscsid, for tests. The tests need a
// dedicated virtual machine (test/qemuguest): targets, sessions and devices belong to the whole
// machine, and exist only in its first network namespace.
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

// Needed is the environment variable that is set where the kernel supports targets and open-iscsi
// is installed. The tests run only there.
const Needed = "KEELSON_NEEDS_ISCSI"

// Need skips a test if the environment variable Needed is not set.
func Need(t testing.TB) {
	t.Helper()
	if os.Getenv(Needed) == "" {
		t.Skip("needs: a machine of its own, whose kernel is an iSCSI target: TestGuest of test/qemuguest makes one")
	}
}

// Initiator is the iSCSI initiator name of this machine.
const Initiator = "iqn.2026-01.example:initiator"

const configfs = "/sys/kernel/config"

// startIscsid starts iscsid once per test process. A second iscsid would take over the sessions of
// the first.
var startIscsid = sync.OnceValue(func() error {
	if err := unix.Mount("configfs", configfs, "configfs", 0, ""); err != nil && !errors.Is(err, unix.EBUSY) {
		return fmt.Errorf("mounting configfs: %w", err)
	}
	for file, text := range map[string]string{
		"initiatorname.iscsi": "InitiatorName=" + Initiator + "\n",
		// Defaults of distributions, with shorter timeouts for an unreachable portal.
		"iscsid.conf": "node.startup = manual\nnode.leading_login = No\nnode.session.timeo.replacement_timeout = " +
			"20\nnode.conn[0].timeo.login_timeout = 15\n" +
			"node.conn[0].timeo.logout_timeout = 5\nnode.conn[0].timeo.noop_out_interval = " +
			"2\nnode.conn[0].timeo.noop_out_timeout = 3\n" +
			"discovery.sendtargets.reopen_max = 1\nnode.session.initial_login_retry_max = 8\nnode.session.scan = " +
			"auto\nnode.session.iscsi.FastAbort = Yes\n",
	} {
		if err := errors.Join(os.MkdirAll("/etc/iscsi", 0o755),
			os.WriteFile(filepath.Join("/etc/iscsi", file), []byte(text), 0o600)); err != nil {
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

// Target is an iSCSI target with disks, at portals of this machine. It exists until the end of the
// test.
type Target struct {
	t       testing.TB
	Name    string
	group   string // folder of its portal group
	disks   map[int]string
	folder  string // folder of the disks' files
	portals []string
}

// Serve creates an iSCSI target without access control. Portals have the form ADDRESS:PORT.
func Serve(t testing.TB, name string, portals ...string) *Target {
	t.Helper()
	Need(t)
	if err := startIscsid(); err != nil {
		t.Fatal(err)
	}
	s := &Target{t: t, Name: name, disks: map[int]string{}, folder: t.TempDir(), portals: portals,
		group: filepath.Join(configfs, "target/iscsi", name, "tpgt_1")}
	s.makeFolder(s.group)
	t.Cleanup(s.removeTarget)
	for _, p := range portals {
		s.makeFolder(filepath.Join(s.group, "np", p))
	}
	for setting, v := range map[string]string{"authentication": "0", "generate_node_acls": "1",
		"demo_mode_write_protect": "0", "cache_dynamic_acls": "1"} {
		s.setAttribute(filepath.Join("attrib", setting), v)
	}
	s.Enable(true)
	return s
}

// Disk adds a disk of size bytes to the target, and returns the path of the file with its content.
func (s *Target) Disk(lun int, size int64) (file string) {
	s.t.Helper()
	store := fmt.Sprintf("%s-%d", strings.NewReplacer(":", "-", ".", "-").Replace(s.Name), lun)
	file = filepath.Join(s.folder, store)
	if err := errors.Join(os.WriteFile(file, nil, 0o600), os.Truncate(file, size)); err != nil {
		s.t.Fatal(err)
	}
	at := filepath.Join(configfs, "target/core/fileio_0", store)
	s.makeFolder(at)
	s.writeAttribute(filepath.Join(at, "control"), fmt.Sprintf("fd_dev_name=%s,fd_dev_size=%d", file, size))
	s.writeAttribute(filepath.Join(at, "enable"), "1")
	unit := filepath.Join(s.group, "lun", fmt.Sprintf("lun_%d", lun))
	s.makeFolder(unit)
	if err := os.Symlink(at, filepath.Join(unit, "disk")); err != nil {
		s.t.Fatal(err)
	}
	s.disks[lun] = at
	return file
}

// Enable sets whether the iSCSI target accepts logins. If it does not, its sessions end.
func (s *Target) Enable(on bool) {
	s.t.Helper()
	value := "0"
	if on {
		value = "1"
	}
	s.setAttribute("enable", value)
}

// Authenticate makes the target require a user name and a password, and authenticate itself with
// userIn and passwordIn.
func (s *Target) Authenticate(user, password, userIn, passwordIn string) {
	s.t.Helper()
	s.setAttribute("attrib/authentication", "1")
	s.setAttribute("param/AuthMethod", "CHAP")
	for name, v := range map[string]string{"userid": user, "password": password, "userid_mutual": userIn,
		"password_mutual": passwordIn} {
		s.setAttribute(filepath.Join("auth", name), v)
	}
}

// AuthenticateDiscovery makes discovery require a user name and a password until the end of the
// test.
func (s *Target) AuthenticateDiscovery(user, password string) {
	s.t.Helper()
	at := filepath.Join(configfs, "target/iscsi/discovery_auth")
	s.writeAttribute(filepath.Join(at, "userid"), user)
	s.writeAttribute(filepath.Join(at, "password"), password)
	s.writeAttribute(filepath.Join(at, "enforce_discovery_auth"), "1")
	s.t.Cleanup(func() { s.writeAttribute(filepath.Join(at, "enforce_discovery_auth"), "0") })
}

func (s *Target) makeFolder(dir string) {
	s.t.Helper()
	if err := os.MkdirAll(dir, 0o755); err != nil {
		s.t.Fatal(err)
	}
}

func (s *Target) setAttribute(name, value string) {
	s.t.Helper()
	s.writeAttribute(filepath.Join(s.group, name), value)
}

func (s *Target) writeAttribute(file, text string) {
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

// removeTarget removes the target, even if it has sessions.
func (s *Target) removeTarget() {
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

// Sessions returns the names of the sessions of the kernel's initiator.
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

// Admin runs iscsiadm as an administrator would.
func Admin(t testing.TB, args ...string) {
	t.Helper()
	if out, err := exec.CommandContext(t.Context(), "iscsiadm", args...).CombinedOutput(); err != nil {
		t.Fatalf("iscsiadm %q: %v: %s", args, err, out)
	}
}

// Records returns the paths of iscsiadm's records of targets, interfaces and portals.
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

// Kills is the name of an environment variable with a part of iscsiadm's arguments. A process that
// runs iscsiadm with such arguments is killed after iscsiadm has completed.
const Kills = "KEELSON_TEST_KILLS"

// Arguments records the arguments of all calls of iscsiadm from now on. It returns a function that
// returns the recorded arguments.
func Arguments(t *testing.T) (read func() string) {
	t.Helper()
	iscsiadm, err := exec.LookPath("iscsiadm")
	if err != nil {
		t.Fatal(err)
	}
	dir := t.TempDir()
	log := filepath.Join(dir, "log")
	script := fmt.Sprintf("#!/bin/sh\necho \"$@\" >> %s\n%s \"$@\"\ncode=$?\ncase \"$*\" in *\"${%s:-never}\"*) kill "+
		"-9 $PPID ;; esac\nexit $code\n", log, iscsiadm, Kills)
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

// Cut drops all packets to and from the portal at address until mend is called.
func Cut(t testing.TB, address string) (mend func()) {
	t.Helper()
	nft := func(text string) {
		t.Helper()
		if out, err := exec.Command("nft", text).CombinedOutput(); err != nil {
			t.Fatalf("nft: %v: %s", err, out)
		}
	}
	nft("table inet cut {\nchain input {\ntype filter hook input priority 0; ip daddr " + address +
		" tcp dport 3260 drop; ip saddr " + address + " tcp sport 3260 drop\n}\n}")
	return func() { nft("delete table inet cut") }
}

// Until waits until cond returns nil.
func Until(t testing.TB, cond func() error) {
	t.Helper()
	if err := wait.For(t.Context(), 100*time.Millisecond, cond); err != nil {
		t.Fatal(err)
	}
}
