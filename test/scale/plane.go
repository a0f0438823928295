package main

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"sync"
	"time"

	v1 "k8s.io/api/core/v1"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/rest"

	appsv1 "k8s.io/api/apps/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"keelson.dev/keelson/controlplane/api"
	"keelson.dev/keelson/internal/wait"
	"keelson.dev/keelson/test/bench/procfs"
	"keelson.dev/keelson/test/testenv/loopback"
)

const (
	replicas      = 3
	readyTimeout  = 2 * time.Minute
	maxNodes      = 10000 // uses of the join token
	replicaMemory = "8Gi"
)

// plane is a control plane of three replicas, each in its own process.
type plane struct {
	*loopback.Plane
	processes *loopback.Processes
	dir       string
	meter     procfs.Meter
}

func startPlane(ctx context.Context, memory string) (*plane, error) {
	dir, err := os.MkdirTemp("", "keelson-scale-")
	if err != nil {
		return nil, err
	}
	self, err := os.Executable()
	if err != nil {
		return nil, err
	}
	p := &plane{dir: dir, processes: &loopback.Processes{
		Program: self, Env: []string{roleEnv + "=" + roleReplica}, Args: []string{"--memory-limit", memory},
	}}
	p.Plane, err = loopback.Start(ctx, dir, loopback.Shape{
		Name: "scale", Replicas: replicas, Ready: readyTimeout, Run: p.processes.Run,
		ClusterCIDR: "10.0.0.0/8", ServiceCIDR: "172.16.0.0/16", NodeTokenUses: maxNodes,
	})
	if err != nil {
		return nil, errors.Join(err, os.RemoveAll(dir))
	}
	p.updateMeter()
	return p, nil
}

// updateMeter sets the processes whose cost is measured to the replicas' current processes. It must
// be called after a replica was restarted.
func (p *plane) updateMeter() {
	p.meter = procfs.Meter{Processes: map[string]int{}}
	for _, name := range p.Names() {
		p.meter.Processes[name] = p.processes.PID(name)
	}
}

func (p *plane) stopPlane() error { return errors.Join(p.Stop(), os.RemoveAll(p.dir)) }

// newClient returns a client of a replica that uses protobuf, as the components of Kubernetes do.
func (p *plane) newClient(replica string) (*kubernetes.Clientset, error) {
	cfg := rest.CopyConfig(p.Config(replica))
	cfg.ContentType, cfg.AcceptContentTypes = "application/vnd.kubernetes.protobuf",
		"application/vnd.kubernetes.protobuf,application/json"
	return kubernetes.NewForConfig(cfg)
}

// selectFollower returns the leader and a replica that is not the leader.
func (p *plane) selectFollower(ctx context.Context) (leader, follower string, err error) {
	if leader, err = p.Leader(ctx); err != nil {
		return "", "", err
	}
	names := p.Names()
	return leader, names[(slices.Index(names, leader)+1)%len(names)], nil
}

// awaitAllReady waits until every replica knows a leader with running controllers. Each must also
// report all members as ready and at most 100 entries behind.
func (p *plane) awaitAllReady(ctx context.Context) error {
	ctx, cancel := context.WithTimeout(ctx, readyTimeout)
	defer cancel()
	return wait.For(ctx, 50*time.Millisecond, func() error {
		for _, name := range p.Names() {
			s, err := p.Status(ctx, name)
			if err != nil {
				return err
			}
			if s.Leader == "" || s.Work != api.WorkBegun {
				return fmt.Errorf("replica %s: leader %q, its work %q", name, s.Leader, s.Work)
			}
			for _, m := range s.Members {
				if m.Ready != "yes" || m.Lag > 100 {
					return fmt.Errorf("replica %s reports member %s: ready %q, %d entries behind", name, m.Name,
						m.Ready, m.Lag)
				}
			}
		}
		return nil
	})
}

// newDeployment returns a Deployment of small pods.
func newDeployment(name string, pods int) *appsv1.Deployment {
	n, labels := int32(pods), map[string]string{"app": name}
	return &appsv1.Deployment{ObjectMeta: metav1.ObjectMeta{Name: name}, Spec: appsv1.DeploymentSpec{
		Replicas: &n, Selector: &metav1.LabelSelector{MatchLabels: labels},
		Template: v1.PodTemplateSpec{ObjectMeta: metav1.ObjectMeta{Labels: labels}, Spec: v1.PodSpec{
			Containers: []v1.Container{{Name: "main", Image: "hello",
				Resources: v1.ResourceRequirements{Requests: v1.ResourceList{
					v1.ResourceCPU: resource.MustParse("100m"), v1.ResourceMemory: resource.MustParse("64Mi")}}}},
		}},
	}}
}

// createNamespace creates a namespace and waits for its default service account, without which pods
// cannot be created.
func createNamespace(ctx context.Context, cs kubernetes.Interface, name string) error {
	ns := &v1.Namespace{ObjectMeta: metav1.ObjectMeta{Name: name}}
	if _, err := cs.CoreV1().Namespaces().Create(ctx, ns, metav1.CreateOptions{}); err != nil {
		return fmt.Errorf("creating namespace %s: %w", name, err)
	}
	ctx, cancel := context.WithTimeout(ctx, readyTimeout)
	defer cancel()
	return wait.For(ctx, 20*time.Millisecond, func() error {
		_, err := cs.CoreV1().ServiceAccounts(name).Get(ctx, "default", metav1.GetOptions{})
		return err
	})
}

// startProfiles starts a CPU profile of each replica for the time during, and returns. finish waits
// for the CPU profiles and the heap profiles that follow them. It does nothing if folder is "".
func (p *plane) startProfiles(ctx context.Context, folder, measure string, during time.Duration) (finish func() error) {
	if folder == "" {
		return func() error { return nil }
	}
	var all sync.WaitGroup
	errs := make([]error, replicas)
	for i, name := range p.Names() {
		all.Go(func() { errs[i] = p.writeProfiles(ctx, folder, measure, name, during) })
	}
	return func() error { all.Wait(); return errors.Join(errs...) }
}

func (p *plane) writeProfiles(ctx context.Context, folder, measure, name string, during time.Duration) error {
	cs, err := p.newClient(name)
	if err != nil {
		return err
	}
	for what, path := range map[string]string{
		"cpu": fmt.Sprintf("profile?seconds=%d", max(1, int(during.Seconds()))), "heap": "heap",
	} {
		raw, err := cs.RESTClient().Get().RequestURI("/debug/pprof/" + path).DoRaw(ctx)
		if err != nil {
			return fmt.Errorf("profile of replica %s: %w", name, err)
		}
		if err := os.WriteFile(filepath.Join(folder, measure+"-"+name+"-"+what+".pprof"), raw, 0o600); err != nil {
			return err
		}
	}
	return nil
}
