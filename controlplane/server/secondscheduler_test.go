package server

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
)

// theirs is a scheduler as others write them: it lists pods and nodes, and binds the pods of its name to nodes with room.
type theirs struct {
	t  *testing.T
	cs *kubernetes.Clientset
	// greedy has it bind every pod without a node, also those that are not its own.
	greedy bool
	bound  map[string]string // pod → node
	late   int               // pods that were bound already
}

const theirName = "theirs"

// round binds what it can once.
func (s *theirs) round(ctx context.Context) error {
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
		free[p.Spec.NodeName] -= cpuOf(&p)
	}
	delete(free, "")
	for _, p := range pods.Items {
		if p.Spec.NodeName != "" || p.Spec.SchedulerName != theirName && !s.greedy {
			continue
		}
		for node, room := range free {
			if room < cpuOf(&p) {
				continue
			}
			err := s.cs.CoreV1().Pods("default").Bind(ctx, &v1.Binding{ObjectMeta: metav1.ObjectMeta{Name: p.Name, UID: p.UID},
				Target: v1.ObjectReference{Kind: "Node", Name: node}}, metav1.CreateOptions{})
			switch {
			case apierrors.IsConflict(err):
				s.late++
			case err != nil:
				return err
			default:
				s.bound[p.Name] = node
				free[node] -= cpuOf(&p)
			}
			break
		}
	}
	return nil
}

func cpuOf(p *v1.Pod) int64 { return p.Spec.Containers[0].Resources.Requests.Cpu().MilliValue() }

func (s *theirs) node(name, cpu string) {
	s.t.Helper()
	ctx, nodes := context.Background(), s.cs.CoreV1().Nodes()
	if _, err := nodes.Create(ctx, &v1.Node{ObjectMeta: metav1.ObjectMeta{Name: name}}, metav1.CreateOptions{}); err != nil {
		s.t.Fatal(err)
	}
	status := fmt.Sprintf(`{"status": {"allocatable": {"cpu": %q, "memory": "64Gi", "pods": "110"}}}`, cpu)
	if _, err := nodes.Patch(ctx, name, types.MergePatchType, []byte(status), metav1.PatchOptions{}, "status"); err != nil {
		s.t.Fatal(err)
	}
}

func (s *theirs) pod(name, scheduler, cpu string) {
	s.t.Helper()
	tolerates := []v1.Toleration{{Operator: v1.TolerationOpExists}} // the taints of nodes of which no agent is heard
	if _, err := s.cs.CoreV1().Pods("default").Create(context.Background(), &v1.Pod{ObjectMeta: metav1.ObjectMeta{Name: name},
		Spec: v1.PodSpec{SchedulerName: scheduler, Tolerations: tolerates, Containers: []v1.Container{{Name: "c", Image: "hello",
			Resources: v1.ResourceRequirements{Requests: v1.ResourceList{v1.ResourceCPU: resource.MustParse(cpu)}}}}}}, metav1.CreateOptions{}); err != nil {
		s.t.Fatal(err)
	}
}

func (s *theirs) list() map[string]*v1.Pod {
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

func secondScheduler(t *testing.T) *theirs {
	path := filepath.Join(t.TempDir(), "scheduler.yaml")
	if err := os.WriteFile(path, []byte(`{apiVersion: kubescheduler.config.k8s.io/v1, kind: KubeSchedulerConfiguration,
		profiles: [{}, {schedulerName: packed}]}`), 0o600); err != nil {
		t.Fatal(err)
	}
	p := newPlane(t, 1, func(c *Config) { c.SchedulerConfig = path })
	if got := p.status("cp1").Schedulers; !slices.Equal(got, []string{"default-scheduler", "packed"}) {
		t.Errorf("the status names the schedulers %q", got)
	}
	s := &theirs{t: t, cs: p.client("cp1"), bound: map[string]string{}}
	eventually(t, func() error { // the namespace's service account
		_, err := s.cs.CoreV1().ServiceAccounts("default").Get(context.Background(), "default", metav1.GetOptions{})
		return err
	})
	return s
}

// What another scheduler has bound is in use for this one, and its pods are its own.
func TestSecondSchedulerIsSeen(t *testing.T) {
	s := secondScheduler(t)
	s.node("n1", "2")
	s.pod("first", theirName, "1500m")
	if err := s.round(t.Context()); err != nil {
		t.Fatal(err)
	}
	if s.bound["first"] != "n1" {
		t.Fatalf("their pod was not bound: %v", s.bound)
	}
	s.pod("ours", "", "1")
	s.pod("nobodys", "ghost", "100m")
	eventually(t, func() error {
		for _, c := range s.list()["ours"].Status.Conditions {
			if c.Type == v1.PodScheduled && strings.Contains(c.Message, "1 Insufficient cpu") {
				return nil
			}
		}
		return fmt.Errorf("our pod says %+v", s.list()["ours"].Status)
	})
	s.node("n2", "2")
	eventually(t, func() error {
		if node := s.list()["ours"].Spec.NodeName; node != "n2" {
			return fmt.Errorf("our pod is on %q", node)
		}
		return nil
	})
	if p := s.list()["nobodys"]; p.Spec.NodeName != "" || len(p.Status.Conditions) > 0 {
		t.Errorf("a pod of nobody was touched: %+v", p)
	}
}

// F90: with two schedulers that bind at once, one of them also what is not its own, every pod is bound once and stays
// there.
func TestSecondSchedulerRaces(t *testing.T) {
	s := secondScheduler(t)
	const pods, nodes = 120, 4
	for i := range nodes {
		s.node(fmt.Sprintf("n%d", i), "64")
	}
	s.greedy = true
	ctx, cancel := context.WithCancel(t.Context())
	var wg sync.WaitGroup
	wg.Go(func() {
		for ctx.Err() == nil {
			if err := s.round(ctx); err != nil && ctx.Err() == nil {
				t.Errorf("their round: %v", err)
				return
			}
		}
	})
	for i := range pods {
		s.pod(fmt.Sprintf("p%d", i), []string{"", theirName, "packed"}[i%3], "1")
	}
	eventually(t, func() error {
		for name, p := range s.list() {
			if p.Spec.NodeName == "" {
				return fmt.Errorf("%s has no node", name)
			}
		}
		return nil
	})
	cancel()
	wg.Wait()
	used, ours := map[string]int64{}, 0
	for name, p := range s.list() {
		used[p.Spec.NodeName] += cpuOf(p)
		switch node, mine := s.bound[name]; {
		case mine && node != p.Spec.NodeName:
			t.Errorf("%s was bound by them to %s and is on %s", name, node, p.Spec.NodeName)
		case !mine:
			ours++
			if p.Spec.SchedulerName == theirName {
				t.Errorf("%s is theirs, and was bound by us", name)
			}
		}
	}
	for node, cpu := range used {
		if cpu > 64000 {
			t.Errorf("node %s holds %dm of 64 cores", node, cpu)
		}
	}
	t.Logf("they bound %d, we %d; %d of their bindings came late", len(s.bound), ours, s.late)
	if len(s.bound) == 0 || ours == 0 {
		t.Error("one of them bound nothing")
	}
}
