// Package links has workers on two links with a router between that knows no pods, with addresses of both families.
package links

import (
	"context"
	"errors"
	"fmt"
	"net/netip"
	"os"
	"slices"
	"strings"
	"testing"
	"time"

	v1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/util/intstr"

	"keelson.dev/keelson/deploy/lab"
	"keelson.dev/keelson/test/testenv"
)

const (
	image = "keelson.dev/hello:v1"
	tools = "keelson.dev/tools:v1"
	soon  = 2 * time.Minute
)

func TestMain(m *testing.M) {
	os.Exit(testenv.MainOn(func(c *lab.Config) { c.ControlPlanes, c.Links, c.Families = 1, 2, lab.FamilyDual }, m))
}

// requireLab skips the test on a lab that was running before and has another configuration.
func requireLab(t *testing.T) {
	t.Helper()
	if c := testenv.Lab().Config; c.Links < 2 || c.Families != lab.FamilyDual {
		t.Skip("the lab that is up has one link, or one family: take it away with 'kctl lab down'")
	}
}

// startPods starts a server and a client on each worker and returns them by worker.
func startPods(t *testing.T, ns string) (servers, askers map[string]*v1.Pod) {
	t.Helper()
	cs := testenv.Client(t)
	servers, askers = map[string]*v1.Pod{}, map[string]*v1.Pod{}
	for _, w := range []string{"w1", "w2", "w3"} {
		for name, into := range map[string]map[string]*v1.Pod{"web": servers, "ask": askers} {
			c := v1.Container{Name: "main", Image: image, ReadinessProbe: &v1.Probe{PeriodSeconds: 1,
				ProbeHandler: v1.ProbeHandler{HTTPGet: &v1.HTTPGetAction{Path: "/healthz",
					Port: intstr.FromInt32(8080)}}}}
			if name == "ask" {
				c = v1.Container{Name: "main", Image: tools, Command: []string{"sleep", "1000000"}, Env: []v1.EnvVar{
					{Name: "IPS",
						ValueFrom: &v1.EnvVarSource{FieldRef: &v1.ObjectFieldSelector{FieldPath: "status.podIPs"}}},
					{Name: "HOSTS",
						ValueFrom: &v1.EnvVarSource{FieldRef: &v1.ObjectFieldSelector{FieldPath: "status.hostIPs"}}}}}
			}
			zero := int64(0)
			p := &v1.Pod{ObjectMeta: metav1.ObjectMeta{Name: name + "-" + w, Labels: map[string]string{"app": name}},
				Spec: v1.PodSpec{NodeName: w, Containers: []v1.Container{c}, TerminationGracePeriodSeconds: &zero}}
			if _, err := cs.CoreV1().Pods(ns).Create(t.Context(), p, metav1.CreateOptions{}); err != nil {
				t.Fatal(err)
			}
			testenv.Eventually(t, soon, func() error {
				got, err := cs.CoreV1().Pods(ns).Get(t.Context(), p.Name, metav1.GetOptions{})
				if err != nil {
					return err
				}
				if !slices.ContainsFunc(got.Status.Conditions, func(c v1.PodCondition) bool {
					return c.Type == v1.PodReady && c.Status == v1.ConditionTrue
				}) {
					return fmt.Errorf("pod %s is not ready: %+v", p.Name, got.Status)
				}
				into[w] = got
				return nil
			})
		}
	}
	return servers, askers
}

// fetchPage fetches a page in a pod. The page must contain the address of the client.
func fetchPage(t *testing.T, from *v1.Pod, address string, port int, want string) error {
	t.Helper()
	host := address
	if strings.Contains(host, ":") {
		host = "[" + host + "]"
	}
	out, err := testenv.Try(t, testenv.Lab().Config.BinDir+"/kctl", "-n", from.Namespace, "exec", from.Name, "--",
		"wget", "-T", "2", "-q", "-O", "-", fmt.Sprintf("http://%s:%d/", host, port))
	if err == nil && !strings.Contains(out, want) {
		err = errors.New("another answer")
	}
	if err != nil {
		return fmt.Errorf("%s on %s to %s: %w: %s", from.Name, from.Spec.NodeName, address, err, out)
	}
	return nil
}

// runOnHost runs a command on a host.
func runOnHost(t *testing.T, host string, args ...string) string {
	t.Helper()
	out, err := testenv.Host(t, host).Command(t.Context(), args...).CombinedOutput()
	if err != nil {
		t.Fatalf("%v on %s: %v: %s", args, host, err, out)
	}
	return string(out)
}

// F107 F108: pods of workers on the same link and on different links have two addresses. They reach
// each other by both, which their environment contains, and by Services of both families. The
// router between the links routes no pod address.
func TestPodsOfBothFamiliesAcrossLinks(t *testing.T) {
	requireLab(t)
	ns := testenv.Namespace(t)
	servers, askers := startPods(t, ns)
	for w, a := range askers {
		want := map[string]string{}
		for _, ip := range a.Status.PodIPs {
			want["IPS"] += "," + ip.IP
		}
		for _, ip := range a.Status.HostIPs {
			want["HOSTS"] += "," + ip.IP
		}
		env := testenv.Kctl(t, "-n", ns, "exec", a.Name, "--", "sh", "-c", "echo $IPS; echo $HOSTS")
		if len(a.Status.PodIPs) != 2 || len(a.Status.HostIPs) != 2 ||
			strings.TrimSpace(env) != want["IPS"][1:]+"\n"+want["HOSTS"][1:] {
			t.Errorf("pod %s has %v on %v, and sees %q", a.Name, a.Status.PodIPs, a.Status.HostIPs, env)
		}
		for other, s := range servers {
			for _, ip := range s.Status.PodIPs {
				testenv.Eventually(t, soon, func() error {
					if err := fetchPage(t, a, ip.IP, 8080, s.Name); err != nil {
						return fmt.Errorf("from %s to %s: %w", w, other, err)
					}
					return nil
				})
			}
		}
	}
	if routes := runOnHost(t, "w1", "ip", "route", "show", "proto",
		"75"); !strings.Contains(routes, "dev keelson-vx") ||
		!strings.Contains(routes, "via 10.89.0.103 dev eth0") {
		t.Errorf("w1 shares a link with w3 and none with w2, and has the routes\n%s", routes)
	}
	testenv.Eventually(t, soon, func() error {
		ranges, err := testenv.Client(t).NetworkingV1().ServiceCIDRs().Get(t.Context(), "kubernetes",
			metav1.GetOptions{})
		if err == nil && (!slices.Equal(ranges.Spec.CIDRs, []string{lab.ServiceCIDR, lab.ServiceCIDR6}) ||
			!meta.IsStatusConditionTrue(ranges.Status.Conditions, "Ready")) {
			err = fmt.Errorf("the ranges of Services: %+v", ranges)
		}
		return err
	})
	both := v1.IPFamilyPolicyRequireDualStack
	svc, err := testenv.Client(t).CoreV1().Services(ns).Create(t.Context(),
		&v1.Service{ObjectMeta: metav1.ObjectMeta{Name: "web"}, Spec: v1.ServiceSpec{
			IPFamilyPolicy: &both, Selector: map[string]string{"app": "web"},
			Ports: []v1.ServicePort{{Port: 80, TargetPort: intstr.FromInt32(8080)}}}}, metav1.CreateOptions{})
	if err != nil {
		t.Fatal(err)
	}
	if len(svc.Spec.ClusterIPs) != 2 {
		t.Fatalf("the Service has %v", svc.Spec.ClusterIPs)
	}
	testenv.Eventually(t, soon, func() error {
		slices, err := testenv.Client(t).DiscoveryV1().EndpointSlices(ns).List(t.Context(),
			metav1.ListOptions{LabelSelector: "kubernetes.io/service-name=web"})
		if err != nil {
			return err
		}
		count := map[string]int{}
		for _, s := range slices.Items {
			count[string(s.AddressType)] += len(s.Endpoints)
		}
		if count["IPv4"] != 3 || count["IPv6"] != 3 {
			return fmt.Errorf("endpoints %v", count)
		}
		return nil
	})
	for _, ip := range svc.Spec.ClusterIPs {
		for _, a := range askers {
			testenv.Eventually(t, soon, func() error { return fetchPage(t, a, ip, 80, "web-") })
		}
	}
}

// F108: a reconnected worker reaches the others and is reached again; nothing is left of a removed
// worker on the others.
func TestWorkersComeAndGo(t *testing.T) {
	requireLab(t)
	if !testenv.Owned() {
		t.Skip("a worker is lost for good: not on a lab that was up before")
	}
	ns := testenv.Namespace(t)
	servers, askers := startPods(t, ns)
	if err := testenv.Lab().Partition("w2"); err != nil {
		t.Fatal(err)
	}
	if err := fetchPage(t, askers["w1"], servers["w2"].Status.PodIP, 8080, "web-w2"); err == nil {
		t.Error("a pod behind a cut cable was reached")
	}
	if err := testenv.Lab().Heal("w2"); err != nil {
		t.Fatal(err)
	}
	for _, ip := range servers["w2"].Status.PodIPs {
		testenv.Eventually(t, soon, func() error { return fetchPage(t, askers["w1"], ip.IP, 8080, "web-w2") })
	}
	testenv.Eventually(t, soon, func() error {
		return fetchPage(t, askers["w3"], servers["w1"].Status.PodIP, 8080, "web-w1")
	})

	gone := netip.MustParseAddr(servers["w2"].Status.PodIP)
	if err := testenv.Lab().Kill(t.Context(), "w2"); err != nil {
		t.Fatal(err)
	}
	if routes := runOnHost(t, "w1", "ip", "route", "get", gone.String()); !strings.Contains(routes, "keelson-vx") {
		t.Errorf("the route to a worker that may come back is %q", routes)
	}
	if err := testenv.Client(t).CoreV1().Nodes().Delete(context.Background(), "w2", metav1.DeleteOptions{}); err !=
		nil && !apierrors.IsNotFound(err) {
		t.Fatal(err)
	}
	for _, w := range []string{"w1", "w3"} {
		testenv.Eventually(t, soon, func() error {
			routes := runOnHost(t, w, "sh", "-c", "ip route show proto 75; ip -6 route show proto 75; ip -o link")
			if strings.Contains(routes, "keelson-vx") {
				return fmt.Errorf("left on %s: %s", w, routes)
			}
			return nil
		})
		testenv.Eventually(t, soon, func() error {
			out, err := testenv.Host(t, w).Command(t.Context(), "ip", "route", "get", gone.String()).CombinedOutput()
			if err == nil || !strings.Contains(string(out), "No route to host") {
				return fmt.Errorf("a packet to a pod that is gone: %v: %s", err, out)
			}
			return nil
		})
	}
	testenv.Eventually(t, soon, func() error {
		return fetchPage(t, askers["w1"], servers["w3"].Status.PodIP, 8080, "web-w3")
	})
}
