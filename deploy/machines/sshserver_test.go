package machines

import (
	"crypto/ed25519"
	"crypto/rand"
	"encoding/pem"
	"errors"
	"io"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"
	"syscall"
	"testing"

	"golang.org/x/crypto/ssh"
	"golang.org/x/crypto/ssh/knownhosts"
)

// sshd is an ssh server on loopback whose commands run on this machine, in an environment of their own.
type sshd struct {
	t       *testing.T
	host    ssh.Signer
	login   ssh.PublicKey // whom it lets in
	env     []string
	address string

	mu    sync.Mutex
	asked []string                           // commands, as they were asked for
	cut   func(command string) (before bool) // hangs up before the command is run
	mute  func(command string) bool          // never answers
}

// newKey is a key of ssh, and its private half as a file has it.
func newKey(t *testing.T) (ssh.Signer, []byte) {
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

// newSSHD starts one, and says as which host it is reached.
func newSSHD(t *testing.T, name string, env ...string) (*sshd, Host) {
	t.Helper()
	dir := t.TempDir()
	login, private := newKey(t)
	host, _ := newKey(t)
	s := &sshd{t: t, host: host, login: login.PublicKey(), env: env}
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	s.address = l.Addr().String()
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
	key, known := filepath.Join(dir, "key"), filepath.Join(dir, "known_hosts")
	line := knownhosts.Line([]string{knownhosts.Normalize(s.address)}, host.PublicKey())
	for path, content := range map[string]string{key: string(private), known: line + "\n"} {
		if err := os.WriteFile(path, []byte(content), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	return s, Host{Name: name, Address: "127.0.0.1", SSH: SSH{Address: "127.0.0.1", Port: l.Addr().(*net.TCPAddr).Port, User: "root", Key: key, KnownHosts: known}}
}

func (s *sshd) serve(c net.Conn) {
	defer c.Close()
	cfg := &ssh.ServerConfig{PublicKeyCallback: func(_ ssh.ConnMetadata, k ssh.PublicKey) (*ssh.Permissions, error) {
		if string(k.Marshal()) != string(s.login.Marshal()) {
			return nil, errors.New("not this key")
		}
		return nil, nil
	}}
	cfg.AddHostKey(s.host)
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

func (s *sshd) session(conn ssh.Conn, ch ssh.Channel, requests <-chan *ssh.Request) {
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
		s.mu.Lock()
		s.asked = append(s.asked, of.Command)
		cut, mute := s.cut, s.mute
		s.mu.Unlock()
		if cut != nil && cut(of.Command) {
			conn.Close()
			return
		}
		if mute != nil && mute(of.Command) {
			continue
		}
		cmd = exec.Command("sh", "-c", of.Command)
		cmd.Env = s.env
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
		all.Go(func() {
			err := cmd.Wait()
			status := struct{ Status uint32 }{}
			var failed *exec.ExitError
			if errors.As(err, &failed) {
				status.Status = uint32(failed.ExitCode())
			}
			ch.SendRequest("exit-status", false, ssh.Marshal(status))
			ch.Close()
		})
	}
	if cmd != nil && cmd.Process != nil {
		syscall.Kill(-cmd.Process.Pid, syscall.SIGKILL) // who asked has gone
	}
	all.Wait()
}

// saw says whether a text was part of any command.
func (s *sshd) saw(text string) bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	for _, c := range s.asked {
		if strings.Contains(c, text) {
			return true
		}
	}
	return false
}
