package attack

import (
	"context"
	"crypto/tls"
	"fmt"
	"io"
	"net"
	"net/http"
	"strconv"
	"strings"
	"testing"
	"time"

	authenticationv1 "k8s.io/api/authentication/v1"
	v1 "k8s.io/api/core/v1"
	rbacv1 "k8s.io/api/rbac/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/util/intstr"
	"k8s.io/client-go/kubernetes"

	"keelson.dev/keelson/deploy/lab"
	"keelson.dev/keelson/test/testenv"
)

// newEditor returns a client that may edit one namespace and nothing else.
func newEditor(t *testing.T, cs kubernetes.Interface, ns string) kubernetes.Interface {
	t.Helper()
	ctx := context.Background()
	bind := &rbacv1.RoleBinding{ObjectMeta: metav1.ObjectMeta{Name: "tenant"},
		RoleRef:  rbacv1.RoleRef{APIGroup: rbacv1.GroupName, Kind: "ClusterRole", Name: "edit"},
		Subjects: []rbacv1.Subject{{Kind: rbacv1.ServiceAccountKind, Namespace: ns, Name: "default"}}}
	if _, err := cs.RbacV1().RoleBindings(ns).Create(ctx, bind, metav1.CreateOptions{}); err != nil {
		t.Fatal(err)
	}
	token, err := cs.CoreV1().ServiceAccounts(ns).CreateToken(ctx, "default", &authenticationv1.TokenRequest{},
		metav1.CreateOptions{})
	if err != nil {
		t.Fatal(err)
	}
	return testenv.TokenClientAt(t, "cp1", token.Status.Token)
}

// startServer starts a pod of the hello image and returns its address.
func startServer(t *testing.T, cs kubernetes.Interface, ns, name, node string) string {
	t.Helper()
	zero := int64(0)
	p := &v1.Pod{ObjectMeta: metav1.ObjectMeta{Name: name, Labels: map[string]string{"app": name}},
		Spec: v1.PodSpec{NodeName: node, TerminationGracePeriodSeconds: &zero,
			Containers: []v1.Container{{Name: "main", Image: "keelson.dev/hello:v1"}}}}
	if _, err := cs.CoreV1().Pods(ns).Create(context.Background(), p, metav1.CreateOptions{}); err != nil {
		t.Fatal(err)
	}
	ip := ""
	testenv.Eventually(t, soon, func() error {
		got, err := cs.CoreV1().Pods(ns).Get(context.Background(), name, metav1.GetOptions{})
		if err != nil {
			return err
		}
		if ip = got.Status.PodIP; got.Status.Phase != v1.PodRunning || ip == "" {
			return fmt.Errorf("pod %s is %s", name, got.Status.Phase)
		}
		return nil
	})
	return ip
}

// exposedService returns a Service of a tenant with external addresses and TCP ports that lead to port 8080 of app.
func exposedService(name, app string, addresses []string, ports ...int32) *v1.Service {
	s := &v1.Service{ObjectMeta: metav1.ObjectMeta{Name: name},
		Spec: v1.ServiceSpec{Selector: map[string]string{"app": app}, ExternalIPs: addresses}}
	for _, p := range ports {
		s.Spec.Ports = append(s.Spec.Ports, v1.ServicePort{Name: fmt.Sprint("p", p), Port: p,
			TargetPort: intstr.FromInt32(8080)})
	}
	return s
}

// fetchPage requests a page from a host and returns the start of its content.
func fetchPage(from lab.Host, url string) (string, error) {
	client := &http.Client{Timeout: 20 * time.Second, Transport: &http.Transport{DisableKeepAlives: true,
		TLSClientConfig: &tls.Config{InsecureSkipVerify: true},
		DialContext: func(ctx context.Context, _, address string) (net.Conn, error) {
			return from.Dial(ctx, address)
		}}}
	resp, err := client.Get(url)
	if err != nil {
		return "", err
	}
	defer resp.Body.Close()
	raw, err := io.ReadAll(io.LimitReader(resp.Body, 200))
	return string(raw), err
}

// requireReadyNodes fails the test for each node that is not Ready.
func requireReadyNodes(t *testing.T, cs kubernetes.Interface) {
	t.Helper()
	nodes, err := cs.CoreV1().Nodes().List(context.Background(), metav1.ListOptions{})
	if err != nil {
		t.Fatal(err)
	}
	for _, n := range nodes.Items {
		for _, c := range n.Status.Conditions {
			if c.Type == v1.NodeReady && c.Status != v1.ConditionTrue {
				t.Errorf("node %s: %s", n.Name, c.Message)
			}
		}
	}
}

// F117. A tenant with edit rights in one namespace uses addresses of replicas, nodes, pods and the
// cluster in Services, and 120,000 pairs of an address and a port in one Service. Each attempt
// costs one request, which is refused with 422. If the status of a Service has such addresses
// anyway, every node still reaches the replicas, the pod, and the pod by its Service; other ports
// of machines work.
func TestServicesTakeNoTrafficOfTheCluster(t *testing.T) {
	cs := guardCluster(t)
	own, theirs := testenv.Namespace(t), testenv.Namespace(t)
	ctx := context.Background()
	hostile := newEditor(t, cs, own)
	workers := []lab.Host{testenv.Host(t, "w1"), testenv.Host(t, "w2"), testenv.Host(t, "w3")}
	victim := startServer(t, cs, theirs, "victim", "w1")
	startServer(t, cs, own, "evil", "w2")
	served, err := cs.CoreV1().Services(theirs).Create(ctx, exposedService("victim", "victim", nil, 80),
		metav1.CreateOptions{})
	if err != nil {
		t.Fatal(err)
	}
	clusterIP := served.Spec.ClusterIP

	var replicaIPs []string
	for _, name := range testenv.Replicas() {
		replicaIPs = append(replicaIPs, testenv.Host(t, name).IP.String())
	}
	refused := func(s *v1.Service, want string) {
		t.Helper()
		_, err := hostile.CoreV1().Services(own).Create(ctx, s, metav1.CreateOptions{})
		if !apierrors.IsInvalid(err) || !strings.Contains(err.Error(), want) {
			t.Errorf("Service %s: %v, want 422 with %q", s.Name, err, want)
		}
	}
	testenv.Eventually(t, soon, func() error { // the role binding counts at every replica
		_, err := hostile.CoreV1().Services(own).List(ctx, metav1.ListOptions{})
		return err
	})
	for _, ip := range replicaIPs {
		for _, port := range []int32{6443, 6444, 6445} {
			refused(exposedService("replica", "evil", []string{ip}, port), "used by a control plane replica")
		}
	}
	refused(exposedService("node", "evil", []string{workers[0].IP.String()}, 10250), "used by the agent of node w1")
	refused(exposedService("pod", "evil", []string{victim}, 8080), "is in the pod range")
	refused(exposedService("cluster", "evil", []string{clusterIP}, 80), "is in the Service range")
	bomb := exposedService("bomb", "evil", nil)
	for i := range 400 {
		bomb.Spec.ExternalIPs = append(bomb.Spec.ExternalIPs, fmt.Sprintf("203.0.%d.%d", i/200, 1+i%200))
	}
	for i := range int32(300) {
		bomb.Spec.Ports = append(bomb.Spec.Ports, v1.ServicePort{Name: fmt.Sprint("p", i), Port: 1000 + i})
	}
	refused(bomb, "are 120000 pairs")

	// Another machine's port that nothing of the cluster uses.
	const free, spare = 18080, "10.89.0.250" // on the link, so that nodes have a route; no host has it
	if _, err := hostile.CoreV1().Services(own).Create(ctx,
		exposedService("honest", "evil", []string{workers[0].IP.String()}, free), metav1.CreateOptions{}); err != nil {
		t.Fatal(err)
	}
	// An address that the API refuses in the spec can be in the status.
	class := "example.com/hostile"
	taken := exposedService("status", "evil", nil, 6443, 6444, 6445, 8080, 80, 10250)
	taken.Spec.Type, taken.Spec.LoadBalancerClass = v1.ServiceTypeLoadBalancer, &class
	made, err := hostile.CoreV1().Services(own).Create(ctx, taken, metav1.CreateOptions{})
	if err != nil {
		t.Fatal(err)
	}
	for _, ip := range append([]string{victim, clusterIP, workers[0].IP.String(), spare}, replicaIPs...) {
		made.Status.LoadBalancer.Ingress = append(made.Status.LoadBalancer.Ingress, v1.LoadBalancerIngress{IP: ip})
	}
	testenv.Eventually(t, soon, func() error {
		now, err := cs.CoreV1().Services(own).Get(ctx, made.Name, metav1.GetOptions{})
		if err != nil {
			return err
		}
		now.Status.LoadBalancer = made.Status.LoadBalancer
		_, err = cs.CoreV1().Services(own).UpdateStatus(ctx, now, metav1.UpdateOptions{})
		return err
	})
	for _, from := range workers {
		testenv.Eventually(t, soon, func() error {
			// the honest addresses of both Services are served: so is all else that is
			for _, at := range []string{net.JoinHostPort(workers[0].IP.String(), strconv.Itoa(free)), spare + ":8080"} {
				if _, err := fetchPage(from, "http://"+at); err != nil {
					return fmt.Errorf("from %s: %w", from.Name, err)
				}
			}
			return nil
		})
		for _, ip := range replicaIPs {
			testenv.Eventually(t, soon, func() error { // a node of a new cluster learns the replicas one by one
				got, err := fetchPage(from, "https://"+net.JoinHostPort(ip, strconv.Itoa(lab.APIPort))+"/livez")
				if err != nil || got != "ok" {
					return fmt.Errorf("from %s: the replica at %s responds with %q: %v", from.Name, ip, got, err)
				}
				return nil
			})
		}
		for _, at := range []string{victim + ":8080", clusterIP + ":80"} {
			if got, err := fetchPage(from, "http://"+at); err != nil || !strings.Contains(got, "victim") {
				t.Errorf("from %s: %s responds with %q: %v, want the victim", from.Name, at, got, err)
			}
		}
	}
	requireReadyNodes(t, cs)
}
