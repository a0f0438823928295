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

// cniPlugins calls the CNI plugins bridge and host-local, in the same way for both sides. Without a
// folder it does nothing.
type cniPlugins struct{ dir, state string }

func (p *cniPlugins) callPlugin(ctx context.Context, verb, id, netns string) error {
	if p.dir == "" {
		return nil
	}
	config := fmt.Sprintf(
		`{"cniVersion":"1.0.0","name":"floor","type":"bridge","bridge":"kfloor0","isGateway":true,"ipMasq":false,
"ipam":{"type":"host-local","dataDir":%q,"ranges":[[{"subnet":"192.0.2.0/24"}]]}}`, p.state)
	_, err := runCommand(ctx, []string{"CNI_COMMAND=" + verb, "CNI_CONTAINERID=" + id, "CNI_NETNS=" + netns,
		"CNI_IFNAME=eth0", "CNI_PATH=" + p.dir},
		config, filepath.Join(p.dir, "bridge"))
	return err
}

// Add, Check, Del, GC and Ready implement agent.Network.
func (p *cniPlugins) Add(ctx context.Context, q agent.NetworkRequest) (agent.NetworkStatus, error) {
	return agent.NetworkStatus{IPs: []string{"192.0.2.2"}}, p.callPlugin(ctx, "ADD", q.SandboxID, q.NetNS)
}
func (p *cniPlugins) Check(context.Context, agent.NetworkRequest) error { return nil }
func (p *cniPlugins) Del(ctx context.Context, q agent.NetworkRequest) error {
	return p.callPlugin(ctx, "DEL", q.SandboxID, q.NetNS)
}
func (p *cniPlugins) GC(context.Context, []string) error { return nil }
func (p *cniPlugins) Ready() error                       { return nil }

// runcRuntime creates pods with runc alone.
type runcRuntime struct {
	dir     string
	network *cniPlugins
}

func newRuncRuntime(dir string, network *cniPlugins) (*runcRuntime, error) {
	if _, err := exec.LookPath("runc"); err != nil {
		return nil, fmt.Errorf("%w (Debian: apt-get install runc)", err)
	}
	r := &runcRuntime{dir: filepath.Join(dir, "reference"), network: network}
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

// writeSpec writes runc's example specification, with the program and the network namespace of a
// pod's container.
func (r *runcRuntime) writeSpec(ctx context.Context, netns string) error {
	file := filepath.Join(r.dir, "bundle", "config.json")
	_ = os.Remove(file)
	if _, err := runCommand(ctx, nil, "", "runc", "spec", "-b", filepath.Dir(file)); err != nil {
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

// measurePod measures the minimum cost of a pod: a network namespace, CNI ADD and two containers.
func (r *runcRuntime) measurePod(ctx context.Context, i int, m durations) (err error) {
	id := fmt.Sprintf("floor-%d-%d", os.Getpid(), i)
	netns := filepath.Join(r.dir, id)
	if err := r.writeSpec(ctx, netns); err != nil {
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
	m.addSince("floor: netns", begin)
	step := time.Now()
	if err := r.network.callPlugin(ctx, "ADD", id, netns); err != nil {
		return err
	}
	m.addSince("floor: cni add", step)
	for _, c := range []string{"-pause", "-app"} {
		step := time.Now()
		if err := callRunc(ctx, "create", "-b", filepath.Join(r.dir, "bundle"), id+c); err != nil {
			return err
		}
		defer func() { _ = callRunc(context.WithoutCancel(ctx), "delete", "-f", id+c) }()
		m.addSince("floor: runc create", step)
		step = time.Now()
		if err := callRunc(ctx, "start", id+c); err != nil {
			return err
		}
		m.addSince("floor: runc start", step)
	}
	m.addSince("floor: pod", begin)
	return r.network.callPlugin(ctx, "DEL", id, netns)
}

// callRunc runs runc without pipes, because the container would hold them open.
func callRunc(ctx context.Context, args ...string) error {
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
