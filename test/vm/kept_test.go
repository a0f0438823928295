package vm

import (
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"testing"

	"github.com/vishvananda/netns"
	"golang.org/x/sys/unix"
)

// If KEEP names a folder, the machines keep running when the test ends, with the folder of the site
// and the completed steps. The next run of the test continues after these steps. A step can so be
// developed without waiting an hour for the steps before it. 'ip netns exec NAME' and ssh -i
// KEEP/site/key reach the machines. To remove them, stop the processes of KEEP/*/pid, and 'ip netns
// del NAME'.
const keptNetwork = "keelson-vm-docs"

// keepMachines makes the cluster's machines outlive the test.
func (c *vmCluster) keepMachines(folder string) netns.NsHandle {
	c.kept = folder
	if err := os.MkdirAll(filepath.Join(folder, "site"), 0o700); err != nil {
		c.Fatal(err)
	}
	ns, err := netns.GetFromName(keptNetwork)
	if err == nil {
		return ns
	}
	if err := runScript("ip netns add " + keptNetwork); err != nil {
		c.Fatal(err)
	}
	if ns, err = netns.GetFromName(keptNetwork); err != nil {
		c.Fatal(err)
	}
	if err := addBridge(ns); err != nil {
		c.Fatal(err)
	}
	return ns
}

// attachKept connects to a kept machine that runs.
func (m *virtualMachine) attachKept(t *testing.T) {
	t.Helper()
	m.kept = true
	raw, err := os.ReadFile(filepath.Join(m.dir, "pid"))
	if err != nil {
		return
	}
	pid, err := strconv.Atoi(string(raw))
	if err != nil {
		t.Fatal(err)
	}
	fd, err := unix.PidfdOpen(pid, 0)
	if err != nil {
		return // it has ended
	}
	// A number may be another process' by now.
	line, err := os.ReadFile(fmt.Sprintf("/proc/%d/cmdline", pid))
	if err != nil || !strings.Contains(string(line), m.dir) {
		_ = unix.Close(fd)
		return
	}
	if m.qemu, err = os.FindProcess(pid); err != nil {
		t.Fatal(err)
	}
	m.ended = make(chan struct{})
	go func(ended chan struct{}) {
		defer close(ended)
		defer unix.Close(fd)
		for { // it is not a child of this process, and its exit can be detected only in this way
			if _, err := unix.Poll([]unix.PollFd{{Fd: int32(fd), Events: unix.POLLIN}}, -1); err != unix.EINTR {
				return
			}
		}
	}(m.ended)
	if err := m.awaitShell(t.Context()); err != nil {
		t.Fatal(err)
	}
}

func (c *vmCluster) stepDone(step string) bool {
	if c.kept == "" {
		return false
	}
	raw, _ := os.ReadFile(filepath.Join(c.kept, "passed"))
	return slices.Contains(strings.Split(string(raw), "\n"), step)
}

// markStepDone records that a step need not be repeated.
func (c *vmCluster) markStepDone(step string) {
	if c.kept == "" {
		return
	}
	f, err := os.OpenFile(filepath.Join(c.kept, "passed"), os.O_APPEND|os.O_CREATE|os.O_WRONLY, 0o600)
	if err != nil {
		c.Fatal(err)
	}
	defer f.Close()
	if _, err := f.WriteString(step + "\n"); err != nil {
		c.Fatal(err)
	}
}
