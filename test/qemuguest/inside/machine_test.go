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

	"keelson.dev/keelson/internal/wait"
)

// machine is the guest itself as a cluster of one machine: one replica and one agent, in its first namespaces and without a lab
// around them. The kernel has iSCSI in its first network namespace alone.
type machine struct {
	*testing.T
	ctx     context.Context
	core    *typed.CoreV1Client
	storage *storage.StorageV1Client
	agent   *exec.Cmd
	agents  []string // its arguments
}

const (
	machineName    = "w1"
	machineAddress = "192.0.2.11"
	logs           = "/tmp/daemons"
)

func oneMachine(t *testing.T) *machine {
	t.Helper()
	m := &machine{T: t, ctx: t.Context()}
	m.must(os.MkdirAll(logs, 0o700))
	m.plug()
	t.Cleanup(m.told)
	replica := []string{"--name=cp1", "--data-dir=/var/lib/keelson/controlplane", "--advertise-address=" + machineAddress}
	made := exec.Command(filepath.Join(programs, "keelson-controlplane"), append([]string{"init", "--output=json"}, replica...)...)
	made.Stderr = os.Stderr
	out, err := made.Output()
	m.must(err)
	var trust struct{ NodeToken, Kubeconfig string }
	m.must(json.Unmarshal(out, &trust))
	// In a machine as slow as this one an agent takes a while to come back: its pods stay, and it does not fence itself.
	m.start("controlplane", append([]string{"keelson-controlplane", "run", "--eviction-seconds=600", "--memory-limit=256Mi"}, replica...))
	cfg, err := clientcmd.BuildConfigFromFlags("", trust.Kubeconfig)
	m.must(err)
	m.core, err = typed.NewForConfig(cfg)
	m.must(err)
	m.storage, err = storage.NewForConfig(cfg)
	m.must(err)
	raw, err := os.ReadFile(trust.Kubeconfig)
	m.must(errors.Join(err, os.WriteFile(kubeconfig, raw, 0o600)))
	m.until(func() error { return m.core.RESTClient().Get().AbsPath("/readyz").Do(m.ctx).Error() }) // tokens are good from then on
	t.Log("the replica serves")
	token := filepath.Join(t.TempDir(), "token")
	m.must(os.WriteFile(token, []byte(trust.NodeToken), 0o600))
	m.agents = []string{"keelson-agent", "--node-name=" + machineName, "--node-ip=" + machineAddress, "--server=" + machineAddress + ":6444",
		"--token-file=" + token, "--archives-dir=" + filepath.Join(programs, "images"), "--cni-bin-dir=" + filepath.Join(programs, "cni"),
		"--local-volumes=false", "--local-api-address=none", "--fence-after=600s"}
	m.agent = m.start("agent", m.agents)
	return m
}

// plug gives the machine an address, at a cable that ends in itself.
func (m *machine) plug() {
	m.Helper()
	cable := &netlink.Veth{LinkAttrs: netlink.LinkAttrs{Name: "eth0"}, PeerName: "eth1"}
	m.must(netlink.LinkAdd(cable))
	address, err := netlink.ParseAddr(machineAddress + "/24")
	m.must(err)
	m.must(netlink.AddrAdd(cable, address))
	for _, name := range []string{"eth0", "eth1"} {
		link, err := netlink.LinkByName(name)
		m.must(err)
		m.must(netlink.LinkSetUp(link))
	}
}

func (m *machine) must(err error) {
	m.Helper()
	if err != nil {
		m.Fatal(err)
	}
}

// start starts a daemon, which ends with the test, the later ones first.
func (m *machine) start(name string, args []string) *exec.Cmd {
	m.Helper()
	log, err := os.OpenFile(filepath.Join(logs, name), os.O_CREATE|os.O_APPEND|os.O_WRONLY, 0o600)
	m.must(err)
	cmd := exec.Command(filepath.Join(programs, args[0]), args[1:]...)
	cmd.Stdout, cmd.Stderr = log, log
	m.must(errors.Join(cmd.Start(), log.Close()))
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

// killAgent ends the agent as a power cut does, and only it.
func (m *machine) killAgent() {
	m.Helper()
	m.must(m.agent.Process.Kill())
	if err := m.agent.Wait(); err == nil {
		m.Error("the agent ended by itself")
	}
}

// startAgain starts it again.
func (m *machine) startAgain() {
	m.Helper()
	m.agent = m.start("agent", m.agents)
}

// told shows what the daemons said to a test that has failed.
func (m *machine) told() {
	for _, name := range []string{"controlplane", "agent"} {
		if raw, err := os.ReadFile(filepath.Join(logs, name)); m.Failed() && err == nil {
			m.Logf("the %s said: %s", name, raw[max(0, len(raw)-8<<10):])
		}
	}
}

func (m *machine) until(cond func() error) {
	m.Helper()
	ctx, cancel := context.WithTimeout(m.ctx, soon)
	defer cancel()
	if err := wait.For(ctx, 250*time.Millisecond, cond); err != nil {
		m.Fatal(err)
	}
}

// make asks until the API has an object: a machine as slow as this one misses deadlines that a server has.
func (m *machine) make(what string, create func() error) {
	m.Helper()
	ctx, cancel := context.WithTimeout(m.ctx, soon)
	defer cancel()
	made(ctx, m.T, what, create)
}

// phases waits until pods of a namespace are in their phases.
func (m *machine) phases(namespace string, want map[string]v1.PodPhase) {
	m.Helper()
	m.until(func() error {
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
				errs = append(errs, fmt.Errorf("pod %s is %s, want %s: %v", name, is[name], phase, m.events(namespace, name)))
			}
		}
		return errors.Join(errs...)
	})
}

// events are the messages of a pod's events.
func (m *machine) events(namespace, pod string) (said []string) {
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

// why returns the output of "kctl why" for an object that has a problem: its exit status is then 2. The command is repeated
// while it fails otherwise: a machine as slow as this one misses the command's deadlines.
func (m *machine) why(args ...string) (output string) {
	m.Helper()
	m.until(func() error {
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
