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

// maxAnswer is the maximum number of bytes that are read of one command's output.
const maxAnswer = 1 << 20

// virtualMachine is one virtual machine.
type virtualMachine struct {
	name, address string
	scripts       string // folder of vm-machine
	key           string // file of the SSH key that it accepts
	dir           string // its own
	release       string // disk of the release
	network       netns.NsHandle
	kept          bool // the machine keeps running when the test ends: KEEP of 'make test-vm-docs'

	qemu     *os.Process
	ended    chan struct{} // once qemu has
	conn     net.Conn
	answer   *bufio.Reader
	commands int
}

// newNetwork returns a network namespace for the machines and this process, without a route to the
// outside.
func newNetwork(t *testing.T) netns.NsHandle {
	t.Helper()
	ns := space.New(t)
	if err := addBridge(ns); err != nil {
		t.Fatal(err)
	}
	return ns
}

func addBridge(ns netns.NsHandle) error {
	return space.In(ns, func() error {
		return runScript("ip link set lo up && ip link add vms type bridge && ip address add 192.0.2.1/24 dev vms && " +
			"ip link set vms up")
	})
}

func runScript(script string) error {
	if out, err := exec.Command("sh", "-c", script).CombinedOutput(); err != nil {
		return fmt.Errorf("%w: %s", err, out)
	}
	return nil
}

// newMachine creates a machine with a network interface, below a folder. It is off.
func newMachine(
	t *testing.T, ns netns.NsHandle, scripts, key, release, below, name string, number int,
) *virtualMachine {
	t.Helper()
	m := &virtualMachine{name: name, address: "192.0.2." + strconv.Itoa(number), scripts: scripts, key: key,
		dir: filepath.Join(below, name), release: release, network: ns}
	if err := os.MkdirAll(m.dir, 0o700); err != nil {
		t.Fatal(err)
	}
	if err := space.In(ns, func() error {
		return runScript("ip link show vm-" + name + " 2>/dev/null || { ip tuntap add vm-" + name +
			" mode tap && ip link set vm-" + name + " master vms up; }")
	}); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if t.Failed() {
			t.Logf("console of %s:\n%s", name, m.consoleTail())
		}
		if !m.kept {
			m.cutPower()
		}
	})
	return m
}

func (m *virtualMachine) consoleTail() string {
	raw, _ := os.ReadFile(filepath.Join(m.dir, "console"))
	return string(raw[max(0, len(raw)-4000):])
}

// switchOn switches the machine on and waits until it accepts commands.
func (m *virtualMachine) switchOn(ctx context.Context) error {
	if m.qemu != nil {
		return m.awaitShell(ctx)
	}
	said, err := os.Create(filepath.Join(m.dir, "said"))
	if err != nil {
		return err
	}
	defer said.Close()
	qemu := exec.Command(filepath.Join(m.scripts, "vm-machine"), m.name, m.address, m.dir, "vm-"+m.name,
		m.key, m.release)
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
	return m.awaitShell(ctx)
}

// awaitShell connects to the machine's shell. qemu discards input before the shell runs, so the
// input is repeated.
func (m *virtualMachine) awaitShell(ctx context.Context) error {
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

// cutPower cuts the machine's power.
func (m *virtualMachine) cutPower() {
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

// runCommand runs a command in the machine's shell, for at most two minutes, and returns its
// output.
func (m *virtualMachine) runCommand(command string) (string, error) {
	return m.runFor(2*time.Minute, command)
}

func (m *virtualMachine) runFor(limit time.Duration, command string) (string, error) {
	m.commands++
	mark := fmt.Sprintf("--answered-%d-%d--", os.Getpid(), m.commands)
	m.conn.SetDeadline(time.Now().Add(limit))
	// The command must not read the next command as its input.
	if _, err := fmt.Fprintf(m.conn, "{ %s\n} </dev/null 2>&1; status=$?; echo; echo %s $status\n", command,
		mark); err != nil {
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
