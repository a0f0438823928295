//go:build linux

// Package nfstest has the kernel serve folders by NFS version 4, for tests. It takes a machine of its own, as test/qemuguest
// makes one: what a kernel serves is seen by all of the machine.
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

// Needed is set where the kernel is one that serves NFS, so that the tests which need it are not skipped.
const Needed = "KEELSON_NEEDS_NFS"

// Need skips a test anywhere else.
func Need(t testing.TB) {
	t.Helper()
	if os.Getenv(Needed) == "" {
		t.Skip("needs: a machine of its own, whose kernel serves NFS: TestGuest of test/qemuguest makes one")
	}
}

// What the kernel's server does with a folder, as nfs-utils numbers it.
const (
	readOnly       = 0x1
	insecurePort   = 0x2 // clients may come from any port
	noSubtreeCheck = 0x400
	root           = 0x2000 // it has a number of its own, by which clients of version 4 find the root
)

// never is when what is told of an export ends.
const never = "2147483647"

// clients is the name of all who may come; nobody is the user and group of none.
const clients, nobody = "keelson-test", "65534"

// Server is the kernel's NFS server in the network namespace of the thread that called Serve, until the end of the test.
type Server struct {
	t       testing.TB
	at      string // where its settings are
	clients string // where it notes them
	listen  string
	dir     string
	proc    string
}

// Serve has the kernel serve dir as the root of all exports at an address (host:port) to clients from that address. The
// kernel reads its settings by what is mounted at a folder of the test's.
func Serve(t testing.TB, dir, listen string) *Server {
	t.Helper()
	s := &Server{t: t, at: filepath.Join(t.TempDir(), "nfsd"), clients: t.TempDir(), listen: listen, dir: dir,
		proc: fmt.Sprintf("/proc/self/task/%d/net/rpc", unix.Gettid())}
	if err := os.Mkdir(s.at, 0o700); err != nil {
		t.Fatal(err)
	}
	if err := unix.Mount("nfsd", s.at, "nfsd", 0, ""); err != nil {
		t.Fatalf("settings of the kernel's NFS server: %v", err)
	}
	t.Cleanup(func() {
		s.Stop()
		if err := unix.Unmount(s.at, unix.MNT_DETACH); err != nil {
			t.Error(err)
		}
	})
	s.prepare("+4", "+4.1", "+4.2", "-2", "-3")
	s.Start()
	return s
}

// Start has the server listen, whose folder everybody may read and write. Of what it was told before it was stopped it knows
// nothing. In the machine's own network namespace nobody waits for clients of a server before it; in another the kernel
// keeps no record of them, and who opens a file waits ten seconds.
func (s *Server) Start() {
	s.t.Helper()
	s.Let(true)
	s.LetWrite(true)
	s.write(filepath.Join(s.proc, "nfsd.fh", "channel"), strings.Join([]string{clients, "1", `\x00000000`, never, s.dir}, " "))
	s.listenAt()
}

// prepare says what the server has before it is started. The kernel takes that of no version for that of all.
func (s *Server) prepare(versions ...string) {
	s.t.Helper()
	for _, v := range versions {
		s.set("versions", v)
	}
	s.set("nfsv4recoverydir", s.clients) // without a record of its clients it waits for those of before
	s.set("nfsv4leasetime", "10")
	s.set("nfsv4gracetime", "10")
}

// listenAt starts the server at its address, and has it wait for no clients of a server before it.
func (s *Server) listenAt() {
	s.t.Helper()
	var plain net.ListenConfig
	plain.SetMultipathTCP(false) // which the kernel's server does not take
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
	s.set("portlist", strconv.Itoa(int(f.Fd())))
	s.set("threads", "2")
	if err := tell(filepath.Join(s.at, "v4_end_grace"), "Y"); err != nil && !errors.Is(err, unix.EBUSY) {
		s.t.Fatal(err)
	}
}

func dial(address string) error {
	conn, err := net.DialTimeout("tcp", address, time.Second)
	if err != nil {
		return err
	}
	return conn.Close()
}

// Stop ends the server: its port is closed.
func (s *Server) Stop() { s.set("threads", "0") }

// Let says whether anybody is a client.
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
	s.write(filepath.Join(s.proc, "auth.unix.ip", "channel"), strings.Join(line, " "))
}

// LetWrite says whether clients may change anything.
func (s *Server) LetWrite(may bool) {
	s.t.Helper()
	flags := insecurePort | noSubtreeCheck | root
	if !may {
		flags |= readOnly
	}
	s.write(filepath.Join(s.proc, "nfsd.export", "channel"), strings.Join([]string{clients, s.dir, never, strconv.Itoa(flags), nobody, nobody, "0"}, " "))
}

func (s *Server) set(name, value string) {
	s.t.Helper()
	s.write(filepath.Join(s.at, name), value)
}

func (s *Server) write(file, line string) {
	s.t.Helper()
	if err := tell(file, line); err != nil {
		s.t.Fatal(err)
	}
}

func tell(file, line string) error {
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
