//go:build linux

// Package nfstest makes the kernel serve folders by NFS version 4, for tests. The tests need a
// dedicated virtual machine (test/qemuguest), because the exports of a kernel belong to the whole
// machine.
package nfstest

import (
	"errors"
	"fmt"
	"net"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"
)

// Needed is the environment variable that is set where the kernel has an NFS server. The tests run
// only there.
const Needed = "KEELSON_NEEDS_NFS"

// Need skips a test if the environment variable Needed is not set.
func Need(t testing.TB) {
	t.Helper()
	if os.Getenv(Needed) == "" {
		t.Skip("needs: a machine of its own, whose kernel serves NFS: TestGuest of test/qemuguest makes one")
	}
}

// Flags of an export, as numbered by nfs-utils.
const (
	readOnly       = 0x1
	insecurePort   = 0x2 // clients may use any port
	noSubtreeCheck = 0x400
	root           = 0x2000 // the export has its own ID, by which clients of version 4 find the root
)

// never is the expiry time of an NFS export that does not expire.
const never = "2147483647"

// clients is the name of all clients; nobody is the anonymous user and group ID.
const clients, nobody = "keelson-test", "65534"

// Server is the kernel's NFS server in the network namespace of the thread that called Serve. It
// exists until the end of the test.
type Server struct {
	t           testing.TB
	settingsDir string // folder of its settings
	recordsDir  string // folder of its client records
	listen      string
	dir         string
	proc        string
}

// Serve makes the kernel serve dir as the root of all exports at an address (host:port) to clients
// from that address. Its settings are in a file system mounted at a folder of the test.
func Serve(t testing.TB, dir, listen string) *Server {
	t.Helper()
	s := &Server{t: t, settingsDir: filepath.Join(t.TempDir(), "nfsd"), recordsDir: t.TempDir(),
		listen: listen, dir: dir,
		proc: fmt.Sprintf("/proc/self/task/%d/net/rpc", unix.Gettid())}
	if err := os.Mkdir(s.settingsDir, 0o700); err != nil {
		t.Fatal(err)
	}
	if err := unix.Mount("nfsd", s.settingsDir, "nfsd", 0, ""); err != nil {
		t.Fatalf("settings of the kernel's NFS server: %v", err)
	}
	t.Cleanup(func() {
		s.Stop()
		if err := unix.Unmount(s.settingsDir, unix.MNT_DETACH); err != nil {
			t.Error(err)
		}
	})
	s.prepareServer("+4", "+4.1", "+4.2", "-2", "-3")
	s.Start()
	return s
}

// Start starts the NFS server. All users may read and write its folder. Settings from before a stop
// are lost. In the machine's own network namespace the server has no grace period. In another
// namespace the kernel stores no client records, so the first open of a file waits ten seconds.
func (s *Server) Start() {
	s.t.Helper()
	s.Let(true)
	s.LetWrite(true)
	s.mustWrite(filepath.Join(s.proc, "nfsd.fh", "channel"),
		strings.Join([]string{clients, "1", `\x00000000`, never, s.dir}, " "))
	s.listenAt()
}

// prepareServer sets the NFS versions of the server before it starts. The kernel treats an empty
// list as all versions.
func (s *Server) prepareServer(versions ...string) {
	s.t.Helper()
	for _, v := range versions {
		s.setValue("versions", v)
	}
	// without client records, the server would wait for clients of its previous run
	s.setValue("nfsv4recoverydir", s.recordsDir)
	s.setValue("nfsv4leasetime", "10")
	s.setValue("nfsv4gracetime", "10")
}

// listenAt makes the NFS server listen at its address, and ends the grace period for clients of a
// previous run.
func (s *Server) listenAt() {
	s.t.Helper()
	var plain net.ListenConfig
	plain.SetMultipathTCP(false) // the kernel's server does not support MPTCP
	l, err := plain.Listen(s.t.Context(), "tcp", s.listen)
	if err != nil {
		s.t.Fatal(err)
	}
	defer l.Close()
	f, err := l.(*net.TCPListener).File()
	if err != nil {
		s.t.Fatal(err)
	}
	defer f.Close()
	s.setValue("portlist", strconv.Itoa(int(f.Fd())))
	s.setValue("threads", "2")
	if err := writeLine(filepath.Join(s.settingsDir, "v4_end_grace"), "Y"); err != nil && !errors.Is(err, unix.EBUSY) {
		s.t.Fatal(err)
	}
}

func dialOnce(address string) error {
	conn, err := net.DialTimeout("tcp", address, time.Second)
	if err != nil {
		return err
	}
	return conn.Close()
}

// Stop stops the server and closes its port.
func (s *Server) Stop() { s.setValue("threads", "0") }

// Let sets whether the server lets clients mount its export. in is true if they may.
func (s *Server) Let(in bool) {
	s.t.Helper()
	host, _, err := net.SplitHostPort(s.listen)
	if err != nil {
		s.t.Fatal(err)
	}
	line := []string{"nfsd", host, never}
	if in {
		line = append(line, clients)
	}
	s.mustWrite(filepath.Join(s.proc, "auth.unix.ip", "channel"), strings.Join(line, " "))
}

// LetWrite exports the directory writable if may is true, else read-only.
func (s *Server) LetWrite(may bool) {
	s.t.Helper()
	flags := insecurePort | noSubtreeCheck | root
	if !may {
		flags |= readOnly
	}
	s.mustWrite(filepath.Join(s.proc, "nfsd.export", "channel"),
		strings.Join([]string{clients, s.dir, never, strconv.Itoa(flags), nobody, nobody, "0"}, " "))
}

func (s *Server) setValue(name, value string) {
	s.t.Helper()
	s.mustWrite(filepath.Join(s.settingsDir, name), value)
}

func (s *Server) mustWrite(file, line string) {
	s.t.Helper()
	if err := writeLine(file, line); err != nil {
		s.t.Fatal(err)
	}
}

func writeLine(file, line string) error {
	f, err := os.OpenFile(file, os.O_WRONLY, 0)
	if err == nil {
		_, err = f.WriteString(line + "\n")
		err = errors.Join(err, f.Close())
	}
	if err != nil {
		return fmt.Errorf("telling the kernel's NFS server %q: %w", line, err)
	}
	return nil
}
