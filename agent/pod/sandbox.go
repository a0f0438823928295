package pod

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"time"

	v1 "k8s.io/api/core/v1"
	cri "k8s.io/cri-api/pkg/apis/runtime/v1"

	"keelson.dev/keelson/agent"
	"keelson.dev/keelson/agent/pod/lifecycle"
	"keelson.dev/keelson/agent/pod/podfiles"
)

// errSandboxFailed is returned for a container that was created in a sandbox early, if the network
// setup of the sandbox then failed.
var errSandboxFailed = errors.New("the network of the sandbox could not be set up")

// earlySandbox is a sandbox in which containers are created while its network is still being set
// up.
type earlySandbox struct {
	id   string
	done chan struct{} // closed when the network setup has succeeded or failed
	ips  []string      // the sandbox's addresses, set before done is closed; empty for the host's network
	err  error
}

// hasFailed waits until the network setup has ended or ctx is done. It reports whether the setup
// failed. A nil earlySandbox has not failed.
func (a *earlySandbox) hasFailed(ctx context.Context) bool {
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
func (pr *podRuntime) runSandbox(ctx context.Context,
	request *cri.RunPodSandboxRequest) (*cri.RunPodSandboxResponse, error) {
	runtime, ok := pr.w.cfg.Deps.Runtime.(agent.EarlyRuntime)
	if !ok {
		return pr.w.cfg.Deps.Runtime.RunPodSandbox(ctx, request)
	}
	at := &earlySandbox{done: make(chan struct{})}
	res, err := runtime.RunPodSandboxEarly(ctx, request, func(id string) {
		pr.w.mu.Lock()
		at.id = id
		pr.early, pr.w.observed.EarlySandbox = at, id
		pr.w.mu.Unlock()
		pr.w.wakeUp()
	})
	if at.err = err; err == nil {
		at.ips, at.err = pr.sandboxAddresses(ctx, res.PodSandboxId)
	}
	close(at.done)
	return res, err
}

// sandboxAddresses queries the runtime for the IP addresses of a sandbox.
func (pr *podRuntime) sandboxAddresses(ctx context.Context, id string) ([]string, error) {
	st, err := pr.w.cfg.Deps.Runtime.PodSandboxStatus(ctx, &cri.PodSandboxStatusRequest{PodSandboxId: id})
	if err != nil {
		return nil, fmt.Errorf("query the addresses of sandbox %s: %w", id, err)
	}
	return sandboxIPs(st.GetStatus()), nil
}

func sandboxIPs(status *cri.PodSandboxStatus) []string {
	n := status.GetNetwork()
	if n.GetIp() == "" {
		return nil
	}
	ips := []string{n.GetIp()}
	for _, more := range n.GetAdditionalIps() {
		ips = append(ips, more.Ip)
	}
	return ips
}

// findEarlySandbox returns the earlySandbox with this ID. It returns nil if the sandbox was created
// with its network, so that its containers need not wait.
func (pr *podRuntime) findEarlySandbox(sandbox string) *earlySandbox {
	pr.w.mu.Lock()
	defer pr.w.mu.Unlock()
	if pr.early != nil && pr.early.id == sandbox {
		return pr.early
	}
	return nil
}

// awaitNetwork waits until the early sandbox has its network, and returns a copy of the pod with
// its addresses. It also rewrites the pod's hosts file, which was written before the addresses were
// known.
func (pr *podRuntime) awaitNetwork(ctx context.Context, pod *v1.Pod, early *earlySandbox) (*v1.Pod, error) {
	select {
	case <-ctx.Done():
		return nil, ctx.Err()
	case <-early.done:
	}
	if early.err != nil {
		return nil, errSandboxFailed
	}
	if pod.Spec.HostNetwork {
		return pod, nil
	}
	p := *pod
	p.Status.PodIP, p.Status.PodIPs = "", nil
	for _, ip := range early.ips {
		p.Status.PodIPs = append(p.Status.PodIPs, v1.PodIP{IP: ip})
	}
	if len(early.ips) > 0 {
		p.Status.PodIP = early.ips[0]
	}
	// The agent's hosts file does not exist if every container mounts its own /etc/hosts.
	if _, err := os.Stat(filepath.Join(podfiles.PodDirectory(pr.w.cfg.Paths, pod.UID), "etc-hosts")); err == nil {
		if _, err := pr.w.configs.WriteHostsFile(&p); err != nil {
			return nil, &waitingError{"RunContainerError", err}
		}
	}
	return &p, nil
}

// awaitPolicies waits until the network policies of a pod are enforced for the addresses of its
// sandbox. If early is not nil, it has the addresses; otherwise they are the observed addresses of
// the sandbox. A pod on the host network does not wait.
func (pr *podRuntime) awaitPolicies(ctx context.Context, pod *v1.Pod, sandbox string, early *earlySandbox) error {
	if pr.w.cfg.Deps.Policies == nil || pod.Spec.HostNetwork {
		return nil
	}
	var ips []string
	if early != nil {
		ips = early.ips
	} else {
		pr.w.mu.Lock()
		for _, sb := range pr.w.observed.Sandboxes {
			if sb.ID == sandbox {
				ips = sb.IPs
			}
		}
		pr.w.mu.Unlock()
	}
	return pr.w.cfg.Deps.Policies.Guard(ctx, pod, ips)
}

func (pr *podRuntime) createSandbox(ctx context.Context, action lifecycle.Action) error {
	start, pod := pr.w.cfg.currentTime(), pr.w.podWithStatus()
	if action.Attempt > 0 {
		pr.w.events.Emit(pod, "", v1.EventTypeNormal, "SandboxChanged",
			"Pod sandbox changed, it will be killed and re-created.")
	}
	pr.w.mu.Lock()
	pr.w.resizer.cgroupLimits = nil // a new cgroup has the limits of its sandbox config
	pr.w.mu.Unlock()
	cfg, err := pr.w.configs.SandboxConfig(pod, action.Attempt)
	if err == nil {
		err = os.MkdirAll(cfg.LogDirectory, 0o755)
	}
	var res *cri.RunPodSandboxResponse
	if err == nil {
		var handler string
		if handler, err = pr.runtimeHandler(pod); err == nil {
			res, err = pr.runSandbox(ctx, &cri.RunPodSandboxRequest{Config: cfg, RuntimeHandler: handler})
		}
	}
	if err != nil {
		if ctx.Err() == nil {
			pr.w.events.Emit(pod, "", v1.EventTypeWarning,
				"FailedCreatePodSandBox", fmt.Sprintf("Failed to create pod sandbox: %v", err))
		}
		return err
	}
	duration := pr.w.cfg.currentTime().Sub(start)
	var parts []string
	var stages []agent.StageTime
	for _, s := range pr.w.cfg.Deps.Runtime.StageTimes(res.PodSandboxId) {
		parts = append(parts, s.Name+" "+s.Duration.Round(100*time.Microsecond).String())
		if s.Name == "cni" {
			s.Name = "network"
			if s.Detail == "" {
				s.Detail = pr.sandboxAddress(ctx, res.PodSandboxId)
			}
			stages = append(stages, s)
		}
	}
	stages = append([]agent.StageTime{{Name: "sandbox", Start: start, Duration: duration,
		Detail: strings.Join(parts, ", ")}}, stages...)
	pr.w.status.reportStage(stages...)
	return nil
}

// runtimeHandler returns the handler of the pod's RuntimeClass; "" is the node's default. It
// returns errNoRuntimeClass if the RuntimeClass does not exist.
func (pr *podRuntime) runtimeHandler(pod *v1.Pod) (string, error) {
	name := pod.Spec.RuntimeClassName
	if name == nil || *name == "" {
		return "", nil
	}
	class, ok := pr.w.cfg.Deps.Objects.RuntimeClass(*name)
	if !ok {
		return "", fmt.Errorf(
			"failed to get sandbox runtime: RuntimeClass %q not found: the pod waits until it is created: %w",
			*name, errNoRuntimeClass)
	}
	return class.Handler, nil
}

// sandboxAddress returns the sandbox's IP address, for the stage report; "" on an error.
func (pr *podRuntime) sandboxAddress(ctx context.Context, id string) string {
	st, err := pr.w.cfg.Deps.Runtime.PodSandboxStatus(ctx, &cri.PodSandboxStatusRequest{PodSandboxId: id})
	if err != nil {
		return "" // the next observation meets the same error and logs it
	}
	return st.GetStatus().GetNetwork().GetIp()
}

// errNoRuntimeClass is the error if the pod's RuntimeClass does not exist. The pod waits until it
// is created.
var errNoRuntimeClass = errors.New("no such RuntimeClass")
