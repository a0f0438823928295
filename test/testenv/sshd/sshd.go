// Package sshd runs an SSH server on loopback in the test's process. Its commands run on this
// machine with a given environment, so that a folder can stand for a machine that is managed by
// ssh.
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

// Server is an SSH server that runs from New until the test ends.
type Server struct {
	Address         string // 127.0.0.1 and the port
	Port            int
	Key, KnownHosts string // files for the client: its private key, and the known hosts
	HostKey         ssh.Signer

	t     *testing.T
	login ssh.PublicKey
	env   []string

	mu       sync.Mutex
	commands []string // all commands received
	fault    func(command string) Fault
}

// Fault is a failure that the server simulates for a command.
type Fault int

// The faults; the zero value is no fault.
const (
	None     Fault = iota
	CutFirst       // the connection is closed before the command is run
	CutLater       // the connection is closed after the command, without its exit status
	Mute           // the command is not run, and gets no response
)

// NewKey returns an SSH key, and its private key in PEM format.
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

// New starts a server. Its commands run with exactly the environment env and SSH_CONNECTION.
func New(t *testing.T, env ...string) *Server {
	t.Helper()
	dir := t.TempDir()
	login, private := NewKey(t)
	host, _ := NewKey(t)
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	s := &Server{t: t, HostKey: host, login: login.PublicKey(), env: env, Address: l.Addr().String(),
		Port: l.Addr().(*net.TCPAddr).Port,
		Key:  filepath.Join(dir, "key"), KnownHosts: filepath.Join(dir, "known_hosts")}
	var served sync.WaitGroup
	served.Go(func() {
		for {
			c, err := l.Accept()
			if err != nil {
				return
			}
			served.Go(func() { s.serveConn(c) })
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

// SetFault calls f for each later command to get its fault. nil = no faults.
func (s *Server) SetFault(f func(command string) Fault) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.fault = f
}

// Commands returns all commands that the server has received.
func (s *Server) Commands() []string {
	s.mu.Lock()
	defer s.mu.Unlock()
	return append([]string(nil), s.commands...)
}

// Received reports whether any received command contains a text.
func (s *Server) Received(text string) bool {
	for _, c := range s.Commands() {
		if strings.Contains(c, text) {
			return true
		}
	}
	return false
}

func (s *Server) serveConn(c net.Conn) {
	defer c.Close()
	cfg := &ssh.ServerConfig{PublicKeyCallback: func(_ ssh.ConnMetadata, k ssh.PublicKey) (*ssh.Permissions, error) {
		if string(k.Marshal()) != string(s.login.Marshal()) {
			return nil, errors.New("unknown key")
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
		all.Go(func() { s.serveSession(conn, ch, reqs) })
	}
}

// recordCommand records a command and returns its fault.
func (s *Server) recordCommand(command string) Fault {
	s.mu.Lock()
	s.commands = append(s.commands, command)
	fault := s.fault
	s.mu.Unlock()
	if fault == nil {
		return None
	}
	return fault(command)
}

func (s *Server) serveSession(conn ssh.Conn, ch ssh.Channel, requests <-chan *ssh.Request) {
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
		fault := s.recordCommand(of.Command)
		if fault == CutFirst {
			conn.Close()
			return
		}
		if fault == Mute {
			continue
		}
		cmd = exec.Command("sh", "-c", of.Command)
		// As OpenSSH does: the addresses of the client and of the server.
		from, to := conn.RemoteAddr().(*net.TCPAddr), conn.LocalAddr().(*net.TCPAddr)
		cmd.Env = append(slices.Clone(s.env), fmt.Sprintf("SSH_CONNECTION=%s %d %s %d", from.IP, from.Port,
			to.IP, to.Port))
		cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true} // to kill it with its children
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
		all.Go(func() { s.sendExit(conn, ch, cmd.Wait(), fault) })
	}
	if cmd != nil && cmd.Process != nil {
		syscall.Kill(-cmd.Process.Pid, syscall.SIGKILL) // the client has disconnected
	}
	all.Wait()
}

// sendExit sends the exit status of a command, or closes the connection with CutLater.
func (s *Server) sendExit(conn ssh.Conn, ch ssh.Channel, err error, fault Fault) {
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
