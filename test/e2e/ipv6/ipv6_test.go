// Package ipv6 has a lab without a single IPv4 address.
package ipv6

import (
	"errors"
	"fmt"
	"net/netip"
	"os"
	"strings"
	"testing"
	"time"

	v1 "k8s.io/api/core/v1"
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
	os.Exit(testenv.MainOn(func(c *lab.Config) { c.Links, c.Families = 2, lab.FamilyIPv6 }, m))
}

// fetchScript returns a shell command that fetches a page without a resolver, which some C
// libraries need even for an address.
func fetchScript(address string, port int) string {
	return fmt.Sprintf(`printf 'GET / HTTP/1.0\r\n\r\n' | nc -w 3 %s %d`, address, port)
}

// F107 F108 F117: three replicas and workers on two links have IPv6 alone; pods reach each other, Services and the API.
func TestClusterOfIPv6(t *testing.T) {
	if testenv.Lab().Config.Families != lab.FamilyIPv6 {
		t.Skip("the lab that is up has IPv4: take it away with 'kctl lab down'")
	}
	cs, ns := testenv.Client(t), testenv.Namespace(t)
	zero := int64(0)
	var pods []*v1.Pod
	for _, w := range []string{"w1", "w2", "w3"} {
		web := v1.Container{Name: "web", Image: image, ReadinessProbe: &v1.Probe{PeriodSeconds: 1,
			ProbeHandler: v1.ProbeHandler{HTTPGet: &v1.HTTPGetAction{Path: "/healthz", Port: intstr.FromInt32(8080)}}}}
		ask := v1.Container{Name: "ask", Image: tools, Command: []string{"sleep", "1000000"}}
		p := &v1.Pod{ObjectMeta: metav1.ObjectMeta{Name: "web-" + w, Labels: map[string]string{"app": "web"}},
			Spec: v1.PodSpec{NodeName: w, Containers: []v1.Container{web, ask}, TerminationGracePeriodSeconds: &zero}}
		if _, err := cs.CoreV1().Pods(ns).Create(t.Context(), p, metav1.CreateOptions{}); err != nil {
			t.Fatal(err)
		}
		testenv.Eventually(t, soon, func() error {
			got, err := cs.CoreV1().Pods(ns).Get(t.Context(), p.Name, metav1.GetOptions{})
			if err == nil && (got.Status.Phase != v1.PodRunning || !got.Status.ContainerStatuses[0].Ready) {
				err = fmt.Errorf("pod %s: %+v", p.Name, got.Status)
			}
			if err == nil {
				pods = append(pods, got)
			}
			return err
		})
	}
	svc, err := cs.CoreV1().Services(ns).Create(t.Context(),
		&v1.Service{ObjectMeta: metav1.ObjectMeta{Name: "web"}, Spec: v1.ServiceSpec{
			Type: v1.ServiceTypeNodePort, Selector: map[string]string{"app": "web"},
			Ports: []v1.ServicePort{{Port: 80, TargetPort: intstr.FromInt32(8080)}}}}, metav1.CreateOptions{})
	if err != nil {
		t.Fatal(err)
	}
	for what, at := range map[string]string{"pod": pods[0].Status.PodIP, "host": pods[0].Status.HostIP,
		"Service": svc.Spec.ClusterIP} {
		if a, err := netip.ParseAddr(at); err != nil || !a.Is6() {
			t.Errorf("the %s is at %q", what, at)
		}
	}
	within := func(p *v1.Pod, command, want string) {
		t.Helper()
		testenv.Eventually(t, soon, func() error {
			out, err := testenv.Try(t, testenv.Lab().Config.BinDir+"/kctl", "-n", ns, "exec", p.Name, "-c", "ask", "--",
				"sh", "-c", command)
			if err == nil && !strings.Contains(out, want) {
				err = errors.New("another answer")
			}
			if err != nil {
				return fmt.Errorf("%s on %s: %w: %s", command, p.Spec.NodeName, err, out)
			}
			return nil
		})
	}
	for _, p := range pods {
		for _, q := range pods {
			within(p, fetchScript(q.Status.PodIP, 8080), q.Name)
		}
		within(p, fetchScript(svc.Spec.ClusterIP, 80), "web-")
		within(p, `printf 'GET /api HTTP/1.0\r\n\r\n' | nc -w 3 "$KUBERNETES_SERVICE_HOST" "$KUBERNETES_SERVICE_PORT"`,
			"HTTPS")
	}
	registry := testenv.Host(t, "registry")
	for _, w := range []string{"w1", "w2"} {
		h := testenv.Host(t, w)
		testenv.Eventually(t, soon, func() error {
			res, err := testenv.HTTP(registry).Get("http://" + h.Endpoint(int(svc.Spec.Ports[0].NodePort)) + "/")
			if err == nil {
				err = res.Body.Close()
			}
			return err
		})
	}
	testenv.Eventually(t, soon, func() error {
		if logs := testenv.Kctl(t, "-n", ns, "logs", "web-w2", "-c", "web"); logs == "" {
			return errors.New("no log of a pod comes through")
		}
		return nil
	})
	four, err := registry.Command(t.Context(), "ip", "-4", "-o", "addr", "show", "scope", "global").CombinedOutput()
	if err != nil || len(four) > 0 {
		t.Errorf("IPv4 addresses of a host: %s, %v", four, err)
	}
}
