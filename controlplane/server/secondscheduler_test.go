package server_test

import (
	"context"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"

	v1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/kubernetes"

	"keelson.dev/keelson/controlplane/server"
	"keelson.dev/keelson/controlplane/server/servertest"
)

// otherScheduler is another scheduler: it lists pods and nodes, and binds the pods with its name to
// nodes with enough CPU.
type otherScheduler struct {
	t  *testing.T
	cs *kubernetes.Clientset
	// greedy makes it bind all pods without a node, including pods of other schedulers.
	greedy bool
	bound  map[string]string // pod → node
	late   int               // pods that were already bound
}

const otherSchedulerName = "theirs"

// bindPods binds all pods that fit, once.
func (s *otherScheduler) bindPods(ctx context.Context) error {
	pods, err := s.cs.CoreV1().Pods("default").List(ctx, metav1.ListOptions{})
	if err != nil {
		return err
	}
	nodes, err := s.cs.CoreV1().Nodes().List(ctx, metav1.ListOptions{})
	if err != nil {
		return err
	}
	free := map[string]int64{}
	for _, n := range nodes.Items {
		free[n.Name] = n.Status.Allocatable.Cpu().MilliValue()
	}
	for _, p := range pods.Items {
		free[p.Spec.NodeName] -= requestedCPU(&p)
	}
	delete(free, "")
	for _, p := range pods.Items {
		if p.Spec.NodeName != "" || p.Spec.SchedulerName != otherSchedulerName && !s.greedy {
			continue
		}
		for node, room := range free {
			if room < requestedCPU(&p) {
				continue
			}
			err := s.cs.CoreV1().Pods("default").Bind(ctx,
				&v1.Binding{ObjectMeta: metav1.ObjectMeta{Name: p.Name, UID: p.UID},
					Target: v1.ObjectReference{Kind: "Node", Name: node}}, metav1.CreateOptions{})
			switch {
			case apierrors.IsConflict(err):
				s.late++
			case err != nil:
				return err
			default:
				s.bound[p.Name] = node
				free[node] -= requestedCPU(&p)
			}
			break
		}
	}
	return nil
}

func requestedCPU(p *v1.Pod) int64 { return p.Spec.Containers[0].Resources.Requests.Cpu().MilliValue() }

func (s *otherScheduler) createNode(name, cpu string) {
	s.t.Helper()
	ctx, nodes := context.Background(), s.cs.CoreV1().Nodes()
	if _, err := nodes.Create(ctx, &v1.Node{ObjectMeta: metav1.ObjectMeta{Name: name}}, metav1.CreateOptions{}); err !=
		nil {
		s.t.Fatal(err)
	}
	status := fmt.Sprintf(`{"status": {"allocatable": {"cpu": %q, "memory": "64Gi", "pods": "110"}}}`, cpu)
	if _, err := nodes.Patch(ctx, name, types.MergePatchType, []byte(status), metav1.PatchOptions{}, "status"); err !=
		nil {
		s.t.Fatal(err)
	}
}

func (s *otherScheduler) createPod(name, scheduler, cpu string) {
	s.t.Helper()
	tolerates := []v1.Toleration{{Operator: v1.TolerationOpExists}} // the taints of nodes without an agent
	if _, err := s.cs.CoreV1().Pods("default").Create(context.Background(),
		&v1.Pod{ObjectMeta: metav1.ObjectMeta{Name: name},
			Spec: v1.PodSpec{SchedulerName: scheduler, Tolerations: tolerates,
				Containers: []v1.Container{{Name: "c", Image: "hello",
					Resources: v1.ResourceRequirements{
						Requests: v1.ResourceList{v1.ResourceCPU: resource.MustParse(cpu)}}}}}},
		metav1.CreateOptions{}); err != nil {
		s.t.Fatal(err)
	}
}

func (s *otherScheduler) listPods() map[string]*v1.Pod {
	s.t.Helper()
	l, err := s.cs.CoreV1().Pods("default").List(context.Background(), metav1.ListOptions{})
	if err != nil {
		s.t.Fatal(err)
	}
	out := map[string]*v1.Pod{}
	for i := range l.Items {
		out[l.Items[i].Name] = &l.Items[i]
	}
	return out
}

func newOtherScheduler(t *testing.T) *otherScheduler {
	path := filepath.Join(t.TempDir(), "scheduler.yaml")
	if err := os.WriteFile(path, []byte(`{apiVersion: kubescheduler.config.k8s.io/v1, kind: KubeSchedulerConfiguration,
		profiles: [{}, {schedulerName: packed}]}`), 0o600); err != nil {
		t.Fatal(err)
	}
	p := newPlane(t, 1, func(c *server.Config) { c.Leader.SchedulerConfig = path })
	if got := p.ClusterStatus("cp1").Schedulers; !slices.Equal(got, []string{"default-scheduler", "packed"}) {
		t.Errorf("schedulers in the status: %q", got)
	}
	s := &otherScheduler{t: t, cs: p.Client("cp1"), bound: map[string]string{}}
	servertest.Eventually(t, func() error { // wait for the service account of the namespace
		_, err := s.cs.CoreV1().ServiceAccounts("default").Get(context.Background(), "default", metav1.GetOptions{})
		return err
	})
	return s
}

// This scheduler counts the pods that another scheduler has bound, and does not bind pods of the
// other scheduler.
func TestSecondSchedulerIsSeen(t *testing.T) {
	s := newOtherScheduler(t)
	s.createNode("n1", "2")
	s.createPod("first", otherSchedulerName, "1500m")
	if err := s.bindPods(t.Context()); err != nil {
		t.Fatal(err)
	}
	if s.bound["first"] != "n1" {
		t.Fatalf("the pod of the other scheduler was not bound: %v", s.bound)
	}
	s.createPod("ours", "", "1")
	s.createPod("nobodys", "ghost", "100m")
	servertest.Eventually(t, func() error {
		for _, c := range s.listPods()["ours"].Status.Conditions {
			if c.Type == v1.PodScheduled && strings.Contains(c.Message, "1 Insufficient cpu") {
				return nil
			}
		}
		return fmt.Errorf("the pod's status is %+v", s.listPods()["ours"].Status)
	})
	s.createNode("n2", "2")
	servertest.Eventually(t, func() error {
		if node := s.listPods()["ours"].Spec.NodeName; node != "n2" {
			return fmt.Errorf("the pod is on %q", node)
		}
		return nil
	})
	if p := s.listPods()["nobodys"]; p.Spec.NodeName != "" || len(p.Status.Conditions) > 0 {
		t.Errorf("a pod of an unknown scheduler was changed: %+v", p)
	}
}

// F90: if two schedulers bind pods concurrently, even pods of each other, every pod is bound once
// and keeps its node.
func TestSecondSchedulerRaces(t *testing.T) {
	s := newOtherScheduler(t)
	const pods, nodes = 120, 4
	for i := range nodes {
		s.createNode(fmt.Sprintf("n%d", i), "64")
	}
	s.greedy = true
	ctx, cancel := context.WithCancel(t.Context())
	var wg sync.WaitGroup
	wg.Go(func() {
		for ctx.Err() == nil {
			if err := s.bindPods(ctx); err != nil && ctx.Err() == nil {
				t.Errorf("the other scheduler: %v", err)
				return
			}
		}
	})
	for i := range pods {
		s.createPod(fmt.Sprintf("p%d", i), []string{"", otherSchedulerName, "packed"}[i%3], "1")
	}
	servertest.Eventually(t, func() error {
		for name, p := range s.listPods() {
			if p.Spec.NodeName == "" {
				return fmt.Errorf("%s has no node", name)
			}
		}
		return nil
	})
	cancel()
	wg.Wait()
	used, ours := map[string]int64{}, 0
	for name, p := range s.listPods() {
		used[p.Spec.NodeName] += requestedCPU(p)
		switch node, mine := s.bound[name]; {
		case mine && node != p.Spec.NodeName:
			t.Errorf("%s was bound by the other scheduler to %s and is on %s", name, node, p.Spec.NodeName)
		case !mine:
			ours++
			if p.Spec.SchedulerName == otherSchedulerName {
				t.Errorf("%s belongs to the other scheduler, and was bound by this one", name)
			}
		}
	}
	for node, cpu := range used {
		if cpu > 64000 {
			t.Errorf("the pods of node %s request %dm of 64 cores", node, cpu)
		}
	}
	t.Logf("the other scheduler bound %d, this one %d; %d bindings of the other scheduler conflicted",
		len(s.bound), ours, s.late)
	if len(s.bound) == 0 || ours == 0 {
		t.Error("a scheduler bound no pods")
	}
}
