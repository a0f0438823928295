package fault

import (
	"context"
	"fmt"
	"net/netip"
	"testing"
	"time"

	v1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/util/intstr"
	"k8s.io/client-go/kubernetes"

	"keelson.dev/keelson/test/testenv"
)

// F117: when the node that answers for an address of a load balancer is cut off, which looks to others as if its power were,
// another one does within three seconds, before the node is called lost, and clients on the link that knew the old one reach the
// pods there. When it is back, it stays with the new one.
func TestAnnouncerCutOff(t *testing.T) {
	ns, cs := testenv.Namespace(t), testenv.Client(t)
	outside := testenv.Host(t, "registry")
	raw := outside.IP.As4()
	raw[3] = 241
	at := netip.AddrPortFrom(netip.AddrFrom4(raw), 80).String()
	maps := cs.CoreV1().ConfigMaps("kube-system")
	if _, err := maps.Create(t.Context(), &v1.ConfigMap{ObjectMeta: metav1.ObjectMeta{Name: "load-balancer-pools"},
		Data: map[string]string{"fault": fmt.Sprintf("addresses: [%s]", netip.AddrFrom4(raw))}},
		metav1.CreateOptions{}); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = maps.Delete(context.Background(), "load-balancer-pools", metav1.DeleteOptions{}) })
	if _, err := cs.CoreV1().Services(ns).Create(t.Context(),
		&v1.Service{ObjectMeta: metav1.ObjectMeta{Name: "web"}, Spec: v1.ServiceSpec{
			Type: v1.ServiceTypeLoadBalancer, Selector: map[string]string{"app": "web"},
			Ports: []v1.ServicePort{{Port: 80, TargetPort: intstr.FromInt32(8080)}}}}, metav1.CreateOptions{}); err !=
		nil {
		t.Fatal(err)
	}
	answers := func(not string) (node string) {
		t.Helper()
		testenv.Eventually(t, soon, func() error {
			s, err := cs.CoreV1().Services(ns).Get(t.Context(), "web", metav1.GetOptions{})
			if err != nil {
				return err
			}
			if node = s.Annotations["keelson.dev/announced-by"]; node == not {
				return fmt.Errorf("node %q answers", node)
			}
			return nil
		})
		return node
	}
	first := answers("")
	knock := func() error {
		ctx, cancel := context.WithTimeout(t.Context(), 200*time.Millisecond)
		defer cancel()
		c, err := outside.Dial(ctx, at)
		if err != nil {
			return err
		}
		return c.Close()
	}
	const bound = 3 * time.Second
	var silence time.Duration
	const times = 5
	for n := range times { // other work of the machine may cost seconds at one time, and hardly each time
		// not where it is cut off
		p := sleeperPod(fmt.Sprint("web-", n), map[string]string{"w1": "w2", "w2": "w3", "w3": "w1"}[first])
		p.Labels = map[string]string{"app": "web"}
		p.Spec.Containers[0].Image, p.Spec.Containers[0].Command = "keelson.dev/hello:v1", nil
		createPod(t, cs, ns, p)
		awaitPod(t, cs, ns, p.Name, requireRunning)
		testenv.Eventually(t, soon, knock)
		longest := longestSilence(t, knock)
		second := cutOffAnnouncer(t, cs, first, answers, knock)
		silence = longest()
		t.Logf("%s responds for the address of %s, which was cut off: for %s no node did", second, first,
			silence.Round(10*time.Millisecond))
		if silence <= bound {
			return
		}
		if err := cs.CoreV1().Pods(ns).Delete(t.Context(), p.Name, metav1.DeleteOptions{}); err != nil {
			t.Fatal(err)
		}
		testenv.Eventually(t, soon, func() error {
			_, err := cs.CoreV1().Pods(ns).Get(t.Context(), p.Name, metav1.GetOptions{})
			if !apierrors.IsNotFound(err) {
				return fmt.Errorf("pod %s: %v", p.Name, err)
			}
			return nil
		})
		first = second
	}
	t.Errorf("no node responded for %s when a node was cut off, %d times; the limit is %s", silence, times, bound)
}

// cutOffAnnouncer cuts off the node that responds for an address, and reconnects it when another
// node responds.
func cutOffAnnouncer(
	t *testing.T, cs kubernetes.Interface, first string, answers func(not string) string, knock func() error,
) (second string) {
	t.Helper()
	if err := testenv.Lab().Partition(first); err != nil {
		t.Fatal(err)
	}
	healed := false
	defer func() {
		if !healed {
			_ = testenv.Lab().Heal(first)
		}
	}()
	second = answers(first)
	testenv.Eventually(t, soon, knock)
	n, err := cs.CoreV1().Nodes().Get(t.Context(), first, metav1.GetOptions{})
	if err != nil {
		t.Fatal(err)
	}
	for _, c := range n.Status.Conditions {
		if c.Type == v1.NodeReady && c.Status != v1.ConditionTrue {
			t.Logf("node %s is lost already: the machine was too busy for a distinction", first)
		}
	}
	if err := testenv.Lab().Heal(first); err != nil {
		t.Fatal(err)
	}
	healed = true
	testenv.Eventually(t, soon, func() error { // the node has a session, sends heartbeats and is Ready
		l, err := cs.CoordinationV1().Leases("kube-node-lease").Get(t.Context(), first, metav1.GetOptions{})
		if err == nil && l.Annotations["keelson.dev/unheard-since"] != "" {
			err = fmt.Errorf("%s has no heartbeat yet", first)
		}
		return err
	})
	awaitNodes(t, cs, map[string]v1.ConditionStatus{first: v1.ConditionTrue})
	if got := answers(""); got != second {
		t.Errorf("%s responds after the link of %s was restored, not %s", got, first, second)
	}
	testenv.Eventually(t, soon, knock)
	return second
}

// longestSilence repeats do until the returned function is called, which returns the longest time
// between two successes.
func longestSilence(t *testing.T, do func() error) func() time.Duration {
	stop, longest := make(chan struct{}), make(chan time.Duration, 1)
	go func() {
		last, most := time.Now(), time.Duration(0)
		for {
			if do() != nil && t.Context().Err() == nil {
				continue
			}
			most, last = max(most, time.Since(last)), time.Now()
			select {
			case <-stop:
				longest <- most
				return
			case <-t.Context().Done():
				return
			default:
			}
		}
	}()
	return func() time.Duration {
		close(stop)
		return <-longest
	}
}
