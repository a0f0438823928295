package main

import (
	"context"
	"encoding/json"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"time"

	"golang.org/x/sys/unix"

	"keelson.dev/keelson/agent"
)

// plugins calls the CNI plugins bridge and host-local, for both sides alike. With
// no folder it does nothing.
type plugins struct{ dir, state string }

func (p *plugins) call(ctx context.Context, verb, id, netns string) error {
	if p.dir == "" {
		return nil
	}
	config := fmt.Sprintf(`{"cniVersion":"1.0.0","name":"floor","type":"bridge","bridge":"kfloor0","isGateway":true,"ipMasq":false,
"ipam":{"type":"host-local","dataDir":%q,"ranges":[[{"subnet":"192.0.2.0/24"}]]}}`, p.state)
	_, err := command(ctx, []string{"CNI_COMMAND=" + verb, "CNI_CONTAINERID=" + id, "CNI_NETNS=" + netns, "CNI_IFNAME=eth0", "CNI_PATH=" + p.dir},
		config, filepath.Join(p.dir, "bridge"))
	return err
}

// Add, Check, Del, GC and Ready implement agent.Network.
func (p *plugins) Add(ctx context.Context, q agent.NetworkRequest) (agent.NetworkStatus, error) {
	return agent.NetworkStatus{IPs: []string{"192.0.2.2"}}, p.call(ctx, "ADD", q.SandboxID, q.NetNS)
}
func (p *plugins) Check(context.Context, agent.NetworkRequest) error { return nil }
func (p *plugins) Del(ctx context.Context, q agent.NetworkRequest) error {
	return p.call(ctx, "DEL", q.SandboxID, q.NetNS)
}
func (p *plugins) GC(context.Context, []string) error { return nil }
func (p *plugins) Ready() error                       { return nil }

// reference makes pods the plain way.
type reference struct {
	dir     string
	network *plugins
}

func newReference(dir string, network *plugins) (*reference, error) {
	if _, err := exec.LookPath("runc"); err != nil {
		return nil, fmt.Errorf("%w (Debian: apt-get install runc)", err)
	}
	r := &reference{dir: filepath.Join(dir, "reference"), network: network}
	root := filepath.Join(r.dir, "bundle", "rootfs", "bin")
	if err := os.MkdirAll(root, 0o755); err != nil {
		return nil, err
	}
	busybox, err := os.ReadFile("/bin/busybox")
	if err != nil {
		return nil, fmt.Errorf("%w (Debian: apt-get install busybox-static)", err)
	}
	if err := os.WriteFile(filepath.Join(root, "busybox"), busybox, 0o755); err != nil {
		return nil, err
	}
	return r, nil
}

// spec is runc's own example, with the program and the namespaces of a pod's
// container.
func (r *reference) spec(ctx context.Context, netns string) error {
	file := filepath.Join(r.dir, "bundle", "config.json")
	_ = os.Remove(file)
	if _, err := command(ctx, nil, "", "runc", "spec", "-b", filepath.Dir(file)); err != nil {
		return err
	}
	data, err := os.ReadFile(file)
	if err != nil {
		return err
	}
	var spec map[string]any
	if err := json.Unmarshal(data, &spec); err != nil {
		return err
	}
	process := spec["process"].(map[string]any)
	process["terminal"], process["args"] = false, []string{"/bin/busybox", "sleep", "1000"}
	for _, n := range spec["linux"].(map[string]any)["namespaces"].([]any) {
		if ns := n.(map[string]any); ns["type"] == "network" {
			ns["path"] = netns
		}
	}
	if data, err = json.Marshal(spec); err != nil {
		return err
	}
	return os.WriteFile(file, data, 0o600)
}

// pod is the floor: namespace, network, two containers.
func (r *reference) pod(ctx context.Context, i int, m measures) (err error) {
	id := fmt.Sprintf("floor-%d-%d", os.Getpid(), i)
	netns := filepath.Join(r.dir, id)
	if err := r.spec(ctx, netns); err != nil {
		return err
	}
	begin := time.Now()
	if err := makeNetns(netns); err != nil {
		return err
	}
	defer func() {
		_ = unix.Unmount(netns, unix.MNT_DETACH)
		_ = os.Remove(netns)
	}()
	m.add("floor: netns", begin)
	step := time.Now()
	if err := r.network.call(ctx, "ADD", id, netns); err != nil {
		return err
	}
	m.add("floor: cni add", step)
	for _, c := range []string{"-pause", "-app"} {
		step := time.Now()
		if err := runc(ctx, "create", "-b", filepath.Join(r.dir, "bundle"), id+c); err != nil {
			return err
		}
		defer func() { _ = runc(context.WithoutCancel(ctx), "delete", "-f", id+c) }()
		m.add("floor: runc create", step)
		step = time.Now()
		if err := runc(ctx, "start", id+c); err != nil {
			return err
		}
		m.add("floor: runc start", step)
	}
	m.add("floor: pod", begin)
	return r.network.call(ctx, "DEL", id, netns)
}

// runc passes no pipes on: the container would hold them open.
func runc(ctx context.Context, args ...string) error {
	cmd := exec.CommandContext(ctx, "runc", args...)
	if err := cmd.Run(); err != nil {
		return fmt.Errorf("runc %v: %w", args, err)
	}
	return nil
}

func makeNetns(path string) error {
	if err := os.WriteFile(path, nil, 0o444); err != nil {
		return err
	}
	done := make(chan error)
	go func() {
		runtime.LockOSThread()
		err := unix.Unshare(unix.CLONE_NEWNET)
		if err == nil {
			err = unix.Mount(fmt.Sprintf("/proc/self/task/%d/ns/net", unix.Gettid()), path, "", unix.MS_BIND, "")
		}
		done <- err
	}()
	return <-done
}
