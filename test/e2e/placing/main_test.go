// Package placing has the lab's replicas run with a scheduler configuration and a quick pace of rebalancing, and sees
// where pods go.
package placing

import (
	"context"
	"encoding/json"
	"fmt"
	"net/http"
	"os"
	"path/filepath"
	"slices"
	"sync"
	"testing"
	"time"

	v1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/kubernetes"
	extenderv1 "k8s.io/kube-scheduler/extender/v1"

	"keelson.dev/keelson/deploy/lab"
	"keelson.dev/keelson/test/testenv"
)

// The extender is a server of this process, on a host of the lab that is neither a replica nor a worker.
const (
	outsideHost  = "registry"
	outsideIP    = "10.89.0.5"
	extenderPort = 8446
	asked        = "e2e.keelson.dev/outside" // the resource for which the extender is asked
)

// configuration is a second profile, which fills the fullest node first, and an extender.
var configuration = fmt.Sprintf(`
apiVersion: kubescheduler.config.k8s.io/v1
kind: KubeSchedulerConfiguration
profiles:
- schedulerName: default-scheduler
- schedulerName: packed
  plugins: {score: {disabled: [{name: "*"}], enabled: [{name: NodeResourcesFit, weight: 10}]}}
  pluginConfig: [{name: NodeResourcesFit, args: {scoringStrategy: {type: MostAllocated, resources: [{name: cpu, weight: 1}]}}}]
extenders:
- {urlPrefix: "http://%s:%d", filterVerb: filter, managedResources: [{name: %s, ignoredByScheduler: true}]}
`, outsideIP, extenderPort, asked)

var flags = []string{"--scheduler-config=/etc/keelson/scheduler.yaml", "--rebalance-interval=2s"}

func TestMain(m *testing.M) { os.Exit(runOnLab(m)) }

func runOnLab(m *testing.M) int {
	folder, err := os.MkdirTemp("", lab.AccessFolder)
	if err == nil {
		err = os.WriteFile(filepath.Join(folder, "scheduler.yaml"), []byte(configuration), 0o600)
	}
	if err != nil {
		fmt.Fprintln(os.Stderr, "files of the control plane:", err)
		return 1
	}
	defer os.RemoveAll(folder)
	return testenv.MainWith(flags, folder, m)
}

const soon = 2 * time.Minute // for a machine that is three times slower and does other work; nothing here measures time

// newNamespace creates the namespace of a test in a lab with the flags.
func newNamespace(t *testing.T) (kubernetes.Interface, string) {
	t.Helper()
	if !slices.Equal(testenv.Lab().Config.ControlPlaneFlags, flags) {
		t.Fatal("the lab that is up was made without the flags of these tests: take it down with 'kctl lab down', so " +
			"that one is made")
	}
	return testenv.Client(t), testenv.Namespace(t)
}

// sleeperPod returns a pod that requests an amount of CPU.
func sleeperPod(name, cpu string) *v1.Pod {
	grace := int64(0)
	return &v1.Pod{ObjectMeta: metav1.ObjectMeta{Name: name}, Spec: v1.PodSpec{TerminationGracePeriodSeconds: &grace,
		Containers: []v1.Container{{Name: "main", Image: "keelson.dev/tools:v1", Command: []string{"sleep", "1000000"},
			Resources: v1.ResourceRequirements{Requests: resourceList(v1.ResourceCPU, cpu)}}}}}
}

// awaitNode waits until the pod is Ready and returns its node.
func awaitNode(t *testing.T, cs kubernetes.Interface, namespace, name string) (node string) {
	t.Helper()
	testenv.Eventually(t, soon, func() error {
		p, err := cs.CoreV1().Pods(namespace).Get(context.Background(), name, metav1.GetOptions{})
		if err != nil {
			return err
		}
		if node = p.Spec.NodeName; !podIsReady(p) {
			return fmt.Errorf("pod %s is not Ready: %+v", name, p.Status)
		}
		return nil
	})
	return node
}

func podIsReady(p *v1.Pod) bool {
	return slices.ContainsFunc(p.Status.Conditions, func(c v1.PodCondition) bool {
		return c.Type == v1.PodReady && c.Status == v1.ConditionTrue
	})
}

// schedulerExtender is a scheduler extender that keeps one of the nodes in each request.
type schedulerExtender struct {
	mu        sync.Mutex
	requested []string // pods
}

func (e *schedulerExtender) serveFilter(t *testing.T, leaves string) {
	t.Helper()
	l, err := testenv.Host(t, outsideHost).Listen(fmt.Sprintf("%s:%d", outsideIP, extenderPort))
	if err != nil {
		t.Fatal(err)
	}
	srv := &http.Server{ReadHeaderTimeout: 10 * time.Second,
		Handler: http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
			var q extenderv1.ExtenderArgs
			if err := json.NewDecoder(r.Body).Decode(&q); err != nil || r.URL.Path != "/filter" || q.Nodes == nil {
				http.Error(w, fmt.Sprint("a question that was not expected: ", r.URL.Path, err), http.StatusBadRequest)
				return
			}
			e.mu.Lock()
			e.requested = append(e.requested, q.Pod.Name)
			e.mu.Unlock()
			a := extenderv1.ExtenderFilterResult{Nodes: &v1.NodeList{}, FailedNodes: extenderv1.FailedNodesMap{}}
			for _, n := range q.Nodes.Items {
				if n.Name == leaves {
					a.Nodes.Items = append(a.Nodes.Items, n)
				} else {
					a.FailedNodes[n.Name] = "not that one"
				}
			}
			_ = json.NewEncoder(w).Encode(a)
		})}
	done := make(chan error, 1)
	go func() { done <- srv.Serve(l) }()
	t.Cleanup(func() { srv.Close(); <-done })
}
