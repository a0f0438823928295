package vm

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/vishvananda/netns"

	"keelson.dev/keelson/internal/wait"
	"keelson.dev/keelson/test/testenv/space"
	"keelson.dev/keelson/test/testenv/tscrate"
)

// maxAnswer bounds what is read of one command.
const maxAnswer = 1 << 20

// machine is one of software.
type machine struct {
	name, address string
	scripts       string // folder of vm-machine
	key           string // file of the ssh key that it lets in
	dir           string // its own
	release       string // disk of the release
	network       netns.NsHandle
	kept          bool // it goes on when the test ends: KEEP of 'make test-vm-docs'

	qemu   *os.Process
	ended  chan struct{} // once qemu has
	conn   net.Conn
	answer *bufio.Reader
	asked  int
}

// network is a namespace in which machines and this process hear each other, and nobody else: it has no way out.
func network(t *testing.T) netns.NsHandle {
	t.Helper()
	ns := space.New(t)
	if err := bridge(ns); err != nil {
		t.Fatal(err)
	}
	return ns
}

func bridge(ns netns.NsHandle) error {
	return space.In(ns, func() error {
		return command("ip link set lo up && ip link add vms type bridge && ip address add 192.0.2.1/24 dev vms && ip link set vms up")
	})
}

func command(script string) error {
	if out, err := exec.Command("sh", "-c", script).CombinedOutput(); err != nil {
		return fmt.Errorf("%w: %s", err, out)
	}
	return nil
}

// newMachine makes a machine with a cable, below a folder; it is off.
func newMachine(t *testing.T, ns netns.NsHandle, scripts, key, release, below, name string, number int) *machine {
	t.Helper()
	m := &machine{name: name, address: "192.0.2." + strconv.Itoa(number), scripts: scripts, key: key, dir: filepath.Join(below, name), release: release, network: ns}
	if err := os.MkdirAll(m.dir, 0o700); err != nil {
		t.Fatal(err)
	}
	if err := space.In(ns, func() error {
		return command("ip link show vm-" + name + " 2>/dev/null || { ip tuntap add vm-" + name + " mode tap && ip link set vm-" + name + " master vms up; }")
	}); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if t.Failed() {
			t.Logf("console of %s:\n%s", name, m.console())
		}
		if !m.kept {
			m.cut()
		}
	})
	return m
}

func (m *machine) console() string {
	raw, _ := os.ReadFile(filepath.Join(m.dir, "console"))
	return string(raw[max(0, len(raw)-4000):])
}

// on switches the machine on and waits until it takes commands.
func (m *machine) on(ctx context.Context) error {
	if m.qemu != nil {
		return m.meet(ctx)
	}
	said, err := os.Create(filepath.Join(m.dir, "said"))
	if err != nil {
		return err
	}
	defer said.Close()
	qemu := exec.Command(filepath.Join(m.scripts, "vm-machine"), m.name, m.address, m.dir, "vm-"+m.name, m.key, m.release)
	qemu.Stderr = said
	qemu.SysProcAttr = &syscall.SysProcAttr{Setsid: m.kept}
	if khz, ok := tscrate.KHz(); ok {
		qemu.Env = append(os.Environ(), fmt.Sprintf("KEELSON_TSC_KHZ=%d", khz))
	}
	if err := space.In(m.network, qemu.Start); err != nil {
		return fmt.Errorf("starting %s: %w", m.name, err)
	}
	m.qemu, m.ended = qemu.Process, make(chan struct{})
	go func(ended chan struct{}) {
		defer close(ended)
		qemu.Wait()
	}(m.ended)
	if err := os.WriteFile(filepath.Join(m.dir, "pid"), []byte(strconv.Itoa(m.qemu.Pid)), 0o600); err != nil {
		return err
	}
	return m.meet(ctx)
}

// meet opens the machine's shell. What is asked before there is one is thrown away by qemu, so it is asked again.
func (m *machine) meet(ctx context.Context) error {
	if m.conn != nil {
		m.conn.Close()
		m.conn = nil
	}
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	go func(ended chan struct{}) {
		select {
		case <-ended:
			cancel()
		case <-ctx.Done():
		}
	}(m.ended)
	err := wait.For(ctx, 500*time.Millisecond, func() (err error) {
		if m.conn != nil {
			m.conn.Close()
		}
		if m.conn, err = net.DialTimeout("unix", filepath.Join(m.dir, "shell"), time.Second); err != nil {
			return err
		}
		m.answer = bufio.NewReader(m.conn)
		_, err = m.runFor(10*time.Second, "systemctl is-active -q address")
		return err
	})
	if err != nil {
		said, _ := os.ReadFile(filepath.Join(m.dir, "said"))
		return fmt.Errorf("%s does not take commands: %w: %s", m.name, err, said)
	}
	return nil
}

// cut takes the machine's power away.
func (m *machine) cut() {
	if m.conn != nil {
		m.conn.Close()
		m.conn = nil
	}
	if m.qemu != nil {
		m.qemu.Kill()
		if m.ended != nil {
			<-m.ended
		}
		m.qemu = nil
	}
}

var errStatus = errors.New("it failed")

// run has the machine's shell run a command, for two minutes at most, and returns what it said.
func (m *machine) run(command string) (string, error) { return m.runFor(2*time.Minute, command) }

func (m *machine) runFor(limit time.Duration, command string) (string, error) {
	m.asked++
	mark := fmt.Sprintf("--answered-%d-%d--", os.Getpid(), m.asked)
	m.conn.SetDeadline(time.Now().Add(limit))
	// The command does not read what is asked next.
	if _, err := fmt.Fprintf(m.conn, "{ %s\n} </dev/null 2>&1; status=$?; echo; echo %s $status\n", command, mark); err != nil {
		return "", fmt.Errorf("%s: asking for %q: %w", m.name, command, err)
	}
	var said strings.Builder
	for {
		line, err := m.answer.ReadString('\n')
		if err != nil {
			return said.String(), fmt.Errorf("%s: answer to %q: %w: %s", m.name, command, err, said.String())
		}
		if code, ok := strings.CutPrefix(line, mark+" "); ok {
			out := strings.TrimSpace(said.String())
			if code = strings.TrimSpace(code); code != "0" {
				return out, fmt.Errorf("%s: %q: %w with %s: %s", m.name, command, errStatus, code, out)
			}
			return out, nil
		}
		if said.Len() < maxAnswer {
			said.WriteString(line)
		}
	}
}
