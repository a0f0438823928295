// Package sshd is an ssh server in the test's own process, on loopback, whose commands run on this machine in an environment of
// their own: a machine that is a folder, for those who make machines by ssh.
package sshd

import (
	"crypto/ed25519"
	"crypto/rand"
	"encoding/pem"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"syscall"
	"testing"

	"golang.org/x/crypto/ssh"
	"golang.org/x/crypto/ssh/knownhosts"
)

// Server is one, from New until the test ends.
type Server struct {
	Address         string // 127.0.0.1 and its port
	Port            int
	Key, KnownHosts string // files for who comes: the key that it lets in, and its own
	HostKey         ssh.Signer

	t     *testing.T
	login ssh.PublicKey
	env   []string

	mu    sync.Mutex
	asked []string // commands, as they were asked for
	fault func(command string) Fault
}

// Fault is what happens to a command.
type Fault int

// The faults; the zero value is none.
const (
	None     Fault = iota
	CutFirst       // the connection ends before the command is run
	CutLater       // it ends when the command has been run, before the answer
	Mute           // nothing is ever said, and nothing run
)

// NewKey is a key of ssh, and its private half as a file has it.
func NewKey(t *testing.T) (ssh.Signer, []byte) {
	t.Helper()
	_, private, err := ed25519.GenerateKey(rand.Reader)
	if err != nil {
		t.Fatal(err)
	}
	signer, err := ssh.NewSignerFromKey(private)
	if err != nil {
		t.Fatal(err)
	}
	block, err := ssh.MarshalPrivateKey(private, "")
	if err != nil {
		t.Fatal(err)
	}
	return signer, pem.EncodeToMemory(block)
}

// New starts a server whose commands have the given environment and no other.
func New(t *testing.T, env ...string) *Server {
	t.Helper()
	dir := t.TempDir()
	login, private := NewKey(t)
	host, _ := NewKey(t)
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	s := &Server{t: t, HostKey: host, login: login.PublicKey(), env: env, Address: l.Addr().String(), Port: l.Addr().(*net.TCPAddr).Port,
		Key: filepath.Join(dir, "key"), KnownHosts: filepath.Join(dir, "known_hosts")}
	var served sync.WaitGroup
	served.Go(func() {
		for {
			c, err := l.Accept()
			if err != nil {
				return
			}
			served.Go(func() { s.serve(c) })
		}
	})
	t.Cleanup(func() { l.Close(); served.Wait() })
	line := knownhosts.Line([]string{knownhosts.Normalize(s.Address)}, host.PublicKey())
	for path, content := range map[string]string{s.Key: string(private), s.KnownHosts: line + "\n"} {
		if err := os.WriteFile(path, []byte(content), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	return s
}

// Break has f say what happens to each command from now on; nil: nothing.
func (s *Server) Break(f func(command string) Fault) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.fault = f
}

// Asked are the commands that were asked for.
func (s *Server) Asked() []string {
	s.mu.Lock()
	defer s.mu.Unlock()
	return append([]string(nil), s.asked...)
}

// Saw says whether a text was part of any command.
func (s *Server) Saw(text string) bool {
	for _, c := range s.Asked() {
		if strings.Contains(c, text) {
			return true
		}
	}
	return false
}

func (s *Server) serve(c net.Conn) {
	defer c.Close()
	cfg := &ssh.ServerConfig{PublicKeyCallback: func(_ ssh.ConnMetadata, k ssh.PublicKey) (*ssh.Permissions, error) {
		if string(k.Marshal()) != string(s.login.Marshal()) {
			return nil, errors.New("not this key")
		}
		return nil, nil
	}}
	cfg.AddHostKey(s.HostKey)
	conn, channels, requests, err := ssh.NewServerConn(c, cfg)
	if err != nil {
		return
	}
	defer conn.Close()
	go func() {
		for r := range requests {
			r.Reply(false, nil)
		}
	}()
	var all sync.WaitGroup
	defer all.Wait()
	for n := range channels {
		ch, reqs, err := n.Accept()
		if err != nil {
			return
		}
		all.Go(func() { s.session(conn, ch, reqs) })
	}
}

// noted keeps a command, and says what happens to it.
func (s *Server) noted(command string) Fault {
	s.mu.Lock()
	s.asked = append(s.asked, command)
	fault := s.fault
	s.mu.Unlock()
	if fault == nil {
		return None
	}
	return fault(command)
}

func (s *Server) session(conn ssh.Conn, ch ssh.Channel, requests <-chan *ssh.Request) {
	defer ch.Close()
	var cmd *exec.Cmd
	var all sync.WaitGroup
	for r := range requests {
		if r.Type != "exec" || cmd != nil {
			r.Reply(false, nil)
			continue
		}
		var of struct{ Command string }
		if ssh.Unmarshal(r.Payload, &of) != nil {
			return
		}
		r.Reply(true, nil)
		fault := s.noted(of.Command)
		if fault == CutFirst {
			conn.Close()
			return
		}
		if fault == Mute {
			continue
		}
		cmd = exec.Command("sh", "-c", of.Command)
		// As OpenSSH has it: who asks, and whom.
		from, to := conn.RemoteAddr().(*net.TCPAddr), conn.LocalAddr().(*net.TCPAddr)
		cmd.Env = append(slices.Clone(s.env), fmt.Sprintf("SSH_CONNECTION=%s %d %s %d", from.IP, from.Port, to.IP, to.Port))
		cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true} // it ends with all that it has begun
		cmd.Stdout, cmd.Stderr = ch, ch.Stderr()
		in, err := cmd.StdinPipe()
		if err == nil {
			err = cmd.Start()
		}
		if err != nil {
			s.t.Error(err)
			return
		}
		go func() { io.Copy(in, ch); in.Close() }()
		all.Go(func() { s.ended(conn, ch, cmd.Wait(), fault) })
	}
	if cmd != nil && cmd.Process != nil {
		syscall.Kill(-cmd.Process.Pid, syscall.SIGKILL) // who asked has gone
	}
	all.Wait()
}

// ended tells how a command has.
func (s *Server) ended(conn ssh.Conn, ch ssh.Channel, err error, fault Fault) {
	if fault == CutLater {
		conn.Close()
		return
	}
	var status struct{ Status uint32 }
	var failed *exec.ExitError
	if errors.As(err, &failed) {
		status.Status = uint32(failed.ExitCode())
	}
	ch.SendRequest("exit-status", false, ssh.Marshal(status))
	ch.Close()
}
