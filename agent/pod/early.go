package pod

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"

	v1 "k8s.io/api/core/v1"
	cri "k8s.io/cri-api/pkg/apis/runtime/v1"

	"keelson.dev/keelson/agent"
)

// errNoSandbox is the error of a container that was created in a sandbox before its network setup
// failed.
var errNoSandbox = errors.New("the sandbox did not come up")

// attachment is a sandbox in which containers are already created while its network is being set
// up.
type attachment struct {
	id   string
	done chan struct{} // closed when the network setup has succeeded or failed
	ips  []string      // set before done is closed; empty for the host's network
	err  error
}

// failed waits until the network setup has ended or ctx is done. It reports whether the setup
// failed. A nil attachment has not failed.
func (a *attachment) failed(ctx context.Context) bool {
	if a == nil {
		return false
	}
	select {
	case <-a.done:
		return a.err != nil
	case <-ctx.Done():
		return false
	}
}

// runSandbox creates a sandbox. If the runtime supports it, containers are created in the sandbox
// before its network is ready.
func (w *worker) runSandbox(ctx context.Context, q *cri.RunPodSandboxRequest) (*cri.RunPodSandboxResponse, error) {
	runtime, ok := w.cfg.Runtime.(agent.EarlyRuntime)
	if !ok {
		return w.cfg.Runtime.RunPodSandbox(ctx, q)
	}
	at := &attachment{done: make(chan struct{})}
	res, err := runtime.RunPodSandboxEarly(ctx, q, func(id string) {
		w.mu.Lock()
		at.id = id
		w.attached, w.o.Early = at, id
		w.mu.Unlock()
		w.poke()
	})
	if at.err = err; err == nil {
		at.ips, at.err = w.addresses(ctx, res.PodSandboxId)
	}
	close(at.done)
	return res, err
}

// addresses queries the runtime for the IP addresses of a sandbox.
func (w *worker) addresses(ctx context.Context, id string) ([]string, error) {
	st, err := w.cfg.Runtime.PodSandboxStatus(ctx, &cri.PodSandboxStatusRequest{PodSandboxId: id})
	if err != nil {
		return nil, fmt.Errorf("asking for the addresses of sandbox %s: %w", id, err)
	}
	return sandboxIPs(st.GetStatus()), nil
}

func sandboxIPs(st *cri.PodSandboxStatus) []string {
	n := st.GetNetwork()
	if n.GetIp() == "" {
		return nil
	}
	ips := []string{n.GetIp()}
	for _, more := range n.GetAdditionalIps() {
		ips = append(ips, more.Ip)
	}
	return ips
}

// attachment returns the attachment of the sandbox with this ID, or nil if its containers are not
// created early.
func (w *worker) attachment(sandbox string) *attachment {
	w.mu.Lock()
	defer w.mu.Unlock()
	if w.attached != nil && w.attached.id == sandbox {
		return w.attached
	}
	return nil
}

// awaitNetwork waits until the sandbox has its network, and returns the pod with its addresses. It
// also rewrites the hosts file, which was written for the early container without the pod's
// addresses.
func (w *worker) awaitNetwork(ctx context.Context, pod *v1.Pod, at *attachment) (*v1.Pod, error) {
	select {
	case <-ctx.Done():
		return nil, ctx.Err()
	case <-at.done:
	}
	if at.err != nil {
		return nil, errNoSandbox
	}
	if pod.Spec.HostNetwork {
		return pod, nil
	}
	p := *pod
	p.Status.PodIP, p.Status.PodIPs = "", nil
	for _, ip := range at.ips {
		p.Status.PodIPs = append(p.Status.PodIPs, v1.PodIP{IP: ip})
	}
	if len(at.ips) > 0 {
		p.Status.PodIP = at.ips[0]
	}
	// The agent's hosts file does not exist if every container mounts its own /etc/hosts.
	if _, err := os.Stat(filepath.Join(directory(w.cfg.Paths, pod.UID), "etc-hosts")); err == nil {
		if _, err := w.hostsFile(&p); err != nil {
			return nil, &reasoned{"RunContainerError", err}
		}
	}
	return &p, nil
}

// awaitPolicies waits until the network policies of a pod are enforced for the addresses of its
// sandbox.
func (w *worker) awaitPolicies(ctx context.Context, pod *v1.Pod, sandbox string, at *attachment) error {
	if w.cfg.Policies == nil || pod.Spec.HostNetwork {
		return nil
	}
	var ips []string
	if at != nil {
		ips = at.ips
	} else {
		w.mu.Lock()
		for _, sb := range w.o.Sandboxes {
			if sb.ID == sandbox {
				ips = sb.IPs
			}
		}
		w.mu.Unlock()
	}
	return w.cfg.Policies.Guard(ctx, pod, ips)
}
