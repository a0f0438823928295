package oci

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"testing"
	"time"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	cri "k8s.io/cri-api/pkg/apis/runtime/v1"

	"keelson.dev/keelson/internal/await"
)

// runEarly starts RunPodSandbox with a network that is attached when attach is closed. It returns
// the sandbox ID when containers can be created, and a channel for the result.
func (r *rig) runEarly(ctx context.Context, attach chan struct{}) (string, *cri.PodSandboxConfig, <-chan error) {
	r.t.Helper()
	r.net.blocked = attach
	r.counter++
	c := &cri.PodSandboxConfig{Metadata: &cri.PodSandboxMetadata{Name: fmt.Sprintf("early%d", r.counter),
		Namespace: "test", Uid: fmt.Sprintf("early%d", r.counter)},
		Hostname: "early", LogDirectory: r.logs}
	prepared, answer := make(chan string, 1), make(chan error, 1)
	go func() {
		_, err := r.RunPodSandboxEarly(ctx, &cri.RunPodSandboxRequest{Config: c}, func(id string) { prepared <- id })
		answer <- err
	}()
	select {
	case id := <-prepared:
		return id, c, answer
	case err := <-answer:
		r.t.Fatalf("the sandbox was never prepared: %v", err)
	case <-time.After(time.Minute):
		r.t.Fatal("the sandbox was never prepared")
	}
	return "", nil, nil
}

// runEarlyContainer runs a container that was created before its sandbox had a network.
func (r *rig) runEarlyContainer(name string) (sandbox, container string) {
	r.t.Helper()
	attach := make(chan struct{})
	sb, sc, answer := r.runEarly(r.ctx(), attach)
	id := r.createContainer(sb, sc, r.containerConfig(name, "exec sleep 1000"))
	close(attach)
	if err := <-answer; err != nil {
		r.t.Fatal(err)
	}
	r.net.blocked = nil
	if _, err := r.StartContainer(r.ctx(), &cri.StartContainerRequest{ContainerId: id}); err != nil {
		r.t.Fatal(err)
	}
	return sb, id
}

// A container is created while the network is being attached, and starts only when it is. F98
func TestCreateBeforeNetwork(t *testing.T) {
	r := newRig(t)
	attach := make(chan struct{})
	sb, sc, answer := r.runEarly(r.ctx(), attach)
	id := r.createContainer(sb, sc, r.containerConfig("a", "exit 7"))
	if _, err := r.StartContainer(r.ctx(), &cri.StartContainerRequest{ContainerId: id}); status.Code(err) !=
		codes.FailedPrecondition || !strings.Contains(err.Error(), "network") {
		t.Errorf("started without a network: %v", err)
	}
	if list, err := r.ListPodSandbox(r.ctx(), &cri.ListPodSandboxRequest{}); err != nil || len(list.Items) != 0 {
		t.Errorf("listed before it was answered: %v, %v", list, err)
	}
	select {
	case err := <-answer:
		t.Fatalf("answered without a network: %v", err)
	default:
	}
	close(attach)
	if err := <-answer; err != nil {
		t.Fatal(err)
	}
	if _, err := r.StartContainer(r.ctx(), &cri.StartContainerRequest{ContainerId: id}); err != nil {
		t.Fatal(err)
	}
	if st := r.waitExit(id); st.ExitCode != 7 {
		t.Errorf("it ended with %v", st)
	}
}

// If the network fails, containers created in the sandbox are removed with it; the rig checks that.
// P10
func TestNetworkFailsUnderContainers(t *testing.T) {
	r := newRig(t)
	refused := errors.New("plugin bridge: no address is left")
	for name, fail := range map[string]func(attach chan struct{}, cancel func()){
		"the plugin fails": func(attach chan struct{}, _ func()) {
			r.net.mu.Lock()
			r.net.fail = refused
			r.net.mu.Unlock()
			close(attach)
		},
		"nobody waits any more": func(_ chan struct{}, cancel func()) { cancel() },
	} {
		t.Run(name, func(t *testing.T) {
			r.net.mu.Lock()
			r.net.fail = nil
			r.net.mu.Unlock()
			ctx, cancel := context.WithCancel(r.ctx())
			defer cancel()
			attach := make(chan struct{})
			sb, sc, answer := r.runEarly(ctx, attach)
			id := r.createContainer(sb, sc, r.containerConfig("a", "exit 7"))
			creating := make(chan error, 1)
			go func() { // another container is being created at that moment
				_, err := r.CreateContainer(r.ctx(), &cri.CreateContainerRequest{PodSandboxId: sb,
					Config: r.containerConfig("b", "exit 7"), SandboxConfig: sc})
				creating <- err
			}()
			fail(attach, cancel)
			if err := <-answer; err == nil || !errors.Is(err, refused) && !errors.Is(err, context.Canceled) {
				t.Errorf("answered %v", err)
			}
			<-creating // created before the end or rejected after it: in both cases it is gone
			if _, err := r.StartContainer(r.ctx(), &cri.StartContainerRequest{ContainerId: id}); status.Code(err) !=
				codes.NotFound {
				t.Errorf("the container is still there: %v", err)
			}
			if l := countLeaks(t, r.cfg); l != (leaks{}) {
				t.Errorf("left %+v", l)
			}
		})
	}
}

// If a shim ends while the network is being attached, RunPodSandbox fails.
func TestShimDiesBeforeNetwork(t *testing.T) {
	r := newRig(t)
	attach := make(chan struct{})
	sb, _, answer := r.runEarly(r.ctx(), attach)
	s, err := r.Runtime.findSandbox(sb)
	if err != nil {
		t.Fatal(err)
	}
	r.Runtime.mu.Lock()
	shim := s.shim
	r.Runtime.mu.Unlock()
	killIfNamed(s.rec.ShimPID, "keelson-shim")
	<-shim.Gone
	await.Until(r.ctx(), t, await.Patience, time.Millisecond, "the end of the shim's connection", func() error {
		// recorded by the connection's reader shortly afterwards
		r.Runtime.mu.Lock()
		defer r.Runtime.mu.Unlock()
		if !s.lost {
			return errors.New("the loss is not noted")
		}
		return nil
	})
	close(attach)
	if err := <-answer; err == nil || !strings.Contains(err.Error(), "shim") {
		t.Errorf("answered %v", err)
	}
}

// The remains of a sandbox that could be neither created nor removed do not block its pod. The next
// request, or the runtime by itself, removes them as soon as possible. P10
func TestRemainsOfAFailedSandbox(t *testing.T) {
	for _, again := range []bool{true, false} {
		t.Run(fmt.Sprint("asked again=", again), func(t *testing.T) {
			r := newRig(t)
			refused := errors.New("plugin bridge: out of order")
			r.net.set(refused, refused)
			q :=
				&cri.RunPodSandboxRequest{Config: &cri.PodSandboxConfig{Metadata: &cri.PodSandboxMetadata{Name: "stuck",
					Namespace: "test", Uid: "stuck"}}}
			for range 2 {
				if _, err := r.RunPodSandbox(r.ctx(), q); !errors.Is(err, refused) {
					t.Errorf("with a broken network: %v", err)
				}
			}
			r.net.set(nil, nil)
			if again {
				if _, err := r.RunPodSandbox(r.ctx(), q); err != nil {
					t.Errorf("with the network repaired: %v", err)
				}
				return
			}
			await.Until(r.ctx(), t, await.Patience, 20*time.Millisecond, "the removal of all sandboxes", func() error {
				r.Runtime.mu.Lock()
				defer r.Runtime.mu.Unlock()
				if n := len(r.sandboxes); n > 0 {
					return fmt.Errorf("%d sandboxes are left", n)
				}
				return nil
			})
		})
	}
}
