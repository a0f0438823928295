//go:build guest

package inside

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/vishvananda/netlink"
	v1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	typed "k8s.io/client-go/kubernetes/typed/core/v1"
	storage "k8s.io/client-go/kubernetes/typed/storage/v1"
	"k8s.io/client-go/tools/clientcmd"

	"keelson.dev/keelson/internal/await"
)

// singleMachine is the guest itself as a cluster of one machine: one replica and one agent, in its first namespaces and without a lab
// around them. The kernel has iSCSI in its first network namespace alone.
type singleMachine struct {
	*testing.T
	ctx       context.Context
	core      *typed.CoreV1Client
	storage   *storage.StorageV1Client
	agent     *exec.Cmd
	agentArgs []string // its arguments
}

const (
	machineName    = "w1"
	machineAddress = "192.0.2.11"
	logs           = "/tmp/daemons"
)

func newSingleMachine(t *testing.T) *singleMachine {
	t.Helper()
	m := &singleMachine{T: t, ctx: t.Context()}
	m.requireNoError(os.MkdirAll(logs, 0o700))
	m.addAddress()
	t.Cleanup(m.logDaemons)
	replica := []string{"--name=cp1", "--data-dir=/var/lib/keelson/controlplane",
		"--advertise-address=" + machineAddress}
	made := exec.Command(filepath.Join(programs, "keelson-controlplane"),
		append([]string{"init", "--output=json"}, replica...)...)
	made.Stderr = os.Stderr
	out, err := made.Output()
	m.requireNoError(err)
	var trust struct{ NodeToken, Kubeconfig string }
	m.requireNoError(json.Unmarshal(out, &trust))
	// In a machine as slow as this one an agent takes a while to come back: its pods stay, and it does not fence itself.
	m.startDaemon("controlplane", append([]string{"keelson-controlplane", "run", "--eviction-seconds=600",
		"--memory-limit=256Mi"}, replica...))
	cfg, err := clientcmd.BuildConfigFromFlags("", trust.Kubeconfig)
	m.requireNoError(err)
	m.core, err = typed.NewForConfig(cfg)
	m.requireNoError(err)
	m.storage, err = storage.NewForConfig(cfg)
	m.requireNoError(err)
	raw, err := os.ReadFile(trust.Kubeconfig)
	m.requireNoError(errors.Join(err, os.WriteFile(kubeconfig, raw, 0o600)))
	// tokens are good from then on
	m.awaitCondition(func() error { return m.core.RESTClient().Get().AbsPath("/readyz").Do(m.ctx).Error() })
	t.Log("the replica serves")
	token := filepath.Join(t.TempDir(), "token")
	m.requireNoError(os.WriteFile(token, []byte(trust.NodeToken), 0o600))
	m.agentArgs = []string{"keelson-agent", "--node-name=" + machineName, "--node-ip=" + machineAddress,
		"--server=" + machineAddress + ":6444",
		"--token-file=" + token, "--archives-dir=" + filepath.Join(programs, "images"),
		"--cni-bin-dir=" + filepath.Join(programs, "cni"),
		"--local-volumes=false", "--local-api-address=none", "--fence-after=600s"}
	m.agent = m.startDaemon("agent", m.agentArgs)
	return m
}

// addAddress gives the machine an address, on a veth pair with both ends on the machine.
func (m *singleMachine) addAddress() {
	m.Helper()
	cable := &netlink.Veth{LinkAttrs: netlink.LinkAttrs{Name: "eth0"}, PeerName: "eth1"}
	m.requireNoError(netlink.LinkAdd(cable))
	address, err := netlink.ParseAddr(machineAddress + "/24")
	m.requireNoError(err)
	m.requireNoError(netlink.AddrAdd(cable, address))
	for _, name := range []string{"eth0", "eth1"} {
		link, err := netlink.LinkByName(name)
		m.requireNoError(err)
		m.requireNoError(netlink.LinkSetUp(link))
	}
}

func (m *singleMachine) requireNoError(err error) {
	m.Helper()
	if err != nil {
		m.Fatal(err)
	}
}

// startDaemon starts a daemon. The daemons are stopped at the end of the test, the last one first.
func (m *singleMachine) startDaemon(name string, args []string) *exec.Cmd {
	m.Helper()
	log, err := os.OpenFile(filepath.Join(logs, name), os.O_CREATE|os.O_APPEND|os.O_WRONLY, 0o600)
	m.requireNoError(err)
	cmd := exec.Command(filepath.Join(programs, args[0]), args[1:]...)
	cmd.Stdout, cmd.Stderr = log, log
	m.requireNoError(errors.Join(cmd.Start(), log.Close()))
	m.Cleanup(func() {
		if cmd.ProcessState != nil {
			return // it was killed
		}
		if err := errors.Join(cmd.Process.Signal(syscall.SIGTERM), cmd.Wait()); err != nil {
			m.Errorf("ending the %s: %v", name, err)
		}
	})
	return cmd
}

// killAgent kills only the agent, as a power cut would.
func (m *singleMachine) killAgent() {
	m.Helper()
	m.requireNoError(m.agent.Process.Kill())
	if err := m.agent.Wait(); err == nil {
		m.Error("the agent ended by itself")
	}
}

// restartAgent starts the agent again.
func (m *singleMachine) restartAgent() {
	m.Helper()
	m.agent = m.startDaemon("agent", m.agentArgs)
}

// logDaemons logs the daemons' output if the test has failed.
func (m *singleMachine) logDaemons() {
	for _, name := range []string{"controlplane", "agent"} {
		if raw, err := os.ReadFile(filepath.Join(logs, name)); m.Failed() && err == nil {
			m.Logf("the %s said: %s", name, raw[max(0, len(raw)-8<<10):])
		}
	}
}

func (m *singleMachine) awaitCondition(cond func() error) {
	m.Helper()
	await.Until(m.ctx, m.T, soon, 250*time.Millisecond, "the machine", cond)
}

// createObject repeats a request until it succeeds: on a machine as slow as this one, requests miss
// the server's deadlines.
func (m *singleMachine) createObject(what string, create func() error) {
	m.Helper()
	ctx, cancel := context.WithTimeout(m.ctx, soon)
	defer cancel()
	createRepeatedly(ctx, m.T, what, create)
}

// awaitPhases waits until pods of a namespace are in their phases.
func (m *singleMachine) awaitPhases(namespace string, want map[string]v1.PodPhase) {
	m.Helper()
	m.awaitCondition(func() error {
		list, err := m.core.Pods(namespace).List(m.ctx, metav1.ListOptions{})
		if err != nil {
			return err
		}
		is := map[string]v1.PodPhase{}
		for _, p := range list.Items {
			is[p.Name] = p.Status.Phase
		}
		var errs []error
		for name, phase := range want {
			if is[name] != phase {
				errs = append(errs, fmt.Errorf("pod %s is %s, want %s: %v", name, is[name], phase,
					m.podEvents(namespace, name)))
			}
		}
		return errors.Join(errs...)
	})
}

// podEvents returns the messages of a pod's events.
func (m *singleMachine) podEvents(namespace, pod string) (said []string) {
	list, err := m.core.Events(namespace).List(m.ctx, metav1.ListOptions{FieldSelector: "involvedObject.name=" + pod})
	if err != nil {
		return []string{err.Error()}
	}
	for _, e := range list.Items {
		said = append(said, e.Reason+": "+e.Message)
	}
	slices.Sort(said)
	return said
}

// kctlWhy returns the output of "kctl why" for an object that has a problem: its exit status is then 2. The command is repeated
// while it fails otherwise: a machine as slow as this one misses the command's deadlines.
func (m *singleMachine) kctlWhy(args ...string) (output string) {
	m.Helper()
	m.awaitCondition(func() error {
		cmd := exec.CommandContext(m.ctx, filepath.Join(programs, "kctl"), append([]string{"why"}, args...)...)
		cmd.Env = append(os.Environ(), "KUBECONFIG="+kubeconfig)
		out, err := cmd.CombinedOutput()
		if cmd.ProcessState == nil || cmd.ProcessState.ExitCode() != 2 {
			return fmt.Errorf("kctl why %s: %v\n%s", strings.Join(args, " "), err, out)
		}
		output = string(out)
		return nil
	})
	return output
}
