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
	"testing"
	"time"

	"github.com/vishvananda/netns"

	"keelson.dev/keelson/internal/wait"
	"keelson.dev/keelson/test/bed/space"
)

// maxAnswer bounds what is read of one command.
const maxAnswer = 1 << 20

// machine is one of software.
type machine struct {
	name, address string
	folder        string // of the root's files
	dir           string // its own
	release       string // disk of the release
	network       netns.NsHandle

	qemu   *exec.Cmd
	ended  chan struct{} // once qemu has
	conn   net.Conn
	answer *bufio.Reader
	asked  int
}

// network is a namespace in which machines hear each other, by multicast on its loopback, and nobody else.
func network(t *testing.T) netns.NsHandle {
	t.Helper()
	ns := space.New(t)
	err := space.In(ns, func() error {
		out, err := exec.Command("sh", "-c", "ip link set lo up multicast on && ip route add 224.0.0.0/4 dev lo").CombinedOutput()
		if err != nil {
			return fmt.Errorf("%w: %s", err, out)
		}
		return nil
	})
	if err != nil {
		t.Fatal(err)
	}
	return ns
}

// newMachine makes a machine's disk; it is off.
func newMachine(t *testing.T, ns netns.NsHandle, folder, release, name string, number int) *machine {
	t.Helper()
	m := &machine{name: name, address: "192.0.2." + strconv.Itoa(number), folder: folder, dir: filepath.Join(t.TempDir(), name),
		release: release, network: ns}
	if err := os.MkdirAll(m.dir, 0o700); err != nil {
		t.Fatal(err)
	}
	if out, err := exec.Command("cp", "--sparse=always", filepath.Join(folder, "base.img"), filepath.Join(m.dir, "disk.img")).CombinedOutput(); err != nil {
		t.Fatalf("%s: %v: %s", name, err, out)
	}
	t.Cleanup(func() {
		if t.Failed() {
			t.Logf("console of %s:\n%s", name, m.console())
		}
		m.cut()
	})
	return m
}

func (m *machine) console() string {
	raw, _ := os.ReadFile(filepath.Join(m.dir, "console"))
	return string(raw[max(0, len(raw)-4000):])
}

// on switches the machine on and waits until it takes commands.
func (m *machine) on(ctx context.Context) error {
	accel := "tcg,thread=multi"
	if os.Getenv("KEELSON_KVM") != "" { // a /dev/kvm that is there need not work: who knows says so
		accel = "kvm"
	}
	socket := filepath.Join(m.dir, "shell")
	os.Remove(socket)
	mac := "52:54:00:00:02:" + fmt.Sprintf("%02x", netIP(m.address))
	m.qemu = exec.Command("qemu-system-x86_64", "-no-user-config", "-nodefaults", "-display", "none", "-machine", "pc", "-accel", accel,
		"-cpu", "max,la57=off", "-smp", "2", "-m", "1536", "-kernel", filepath.Join(m.folder, "vmlinuz"), "-initrd", filepath.Join(m.folder, "initrd"),
		"-append", "console=ttyS0 loglevel=4 root=/dev/vda rw mitigations=off nokaslr tsc=reliable net.ifnames=0 keelson.name="+m.name+" keelson.address="+m.address,
		"-drive", "file="+filepath.Join(m.dir, "disk.img")+",if=virtio,format=raw,cache=writeback", "-drive", "file="+m.release+",if=virtio,format=raw,readonly=on",
		"-netdev", "socket,id=n,mcast=230.0.0.1:1234,localaddr=127.0.0.1", "-device", "virtio-net-pci,netdev=n,mac="+mac,
		"-device", "virtio-rng-pci", "-device", "virtio-serial", "-chardev", "socket,id=s,path="+socket+",server=on,wait=off",
		"-device", "virtserialport,chardev=s,name=shell", "-serial", "file:"+filepath.Join(m.dir, "console"))
	m.qemu.Stderr = os.Stderr
	if err := space.In(m.network, m.qemu.Start); err != nil {
		return fmt.Errorf("starting %s: %w", m.name, err)
	}
	m.ended = make(chan struct{})
	go func(qemu *exec.Cmd, ended chan struct{}) {
		defer close(ended)
		qemu.Wait()
	}(m.qemu, m.ended)
	return m.meet(ctx)
}

func netIP(address string) int {
	n, _ := strconv.Atoi(address[strings.LastIndex(address, ".")+1:])
	return n
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
		return fmt.Errorf("%s does not take commands: %w", m.name, err)
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
		m.qemu.Process.Kill()
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
	if _, err := fmt.Fprintf(m.conn, "{ %s\n} </dev/null 2>&1; echo; echo %s $?\n", command, mark); err != nil {
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
