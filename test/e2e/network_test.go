package e2e

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"testing"

	authenticationv1 "k8s.io/api/authentication/v1"
	v1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/rest"

	"keelson.dev/keelson/deploy/lab"
	"keelson.dev/keelson/test/testenv"
)

// F102 F107 F108 F117: pods reach each other across nodes, through Services, and
// hosts reach them through node ports of every worker.
func TestNetwork(t *testing.T) {
	w := newNamespace(t)
	w.createWeb(webDeployment("web", 3))
	svc := w.createService(webService("web", v1.ServiceTypeNodePort))
	client := sleeperPod("client")
	client.Spec.NodeName = "w1"
	w.createPod(client)
	pods := w.awaitReplicas("web", 3)
	w.awaitPod("client", requireReady)

	nodes := map[string]bool{}
	for _, p := range pods {
		nodes[p.Spec.NodeName] = true
		if !strings.HasPrefix(p.Status.PodIP, "10.244.") {
			t.Errorf("pod %s has address %s, want one of 10.244.0.0/16", p.Name, p.Status.PodIP)
		}
		w.awaitKctl([]string{"-n", w.ns, "exec", "client", "--", "wget", "-q", "-O", "-",
			fmt.Sprintf("http://%s:8080/", p.Status.PodIP)}, p.Name)
	}
	if len(nodes) < 2 {
		t.Errorf("three replicas share the nodes %v: the scheduler does not spread", nodes)
	}
	testenv.Eventually(t, soon, func() error {
		out, err := testenv.Try(t, testenv.Lab().Config.BinDir+"/kctl", "-n", w.ns, "exec", "client", "--", "wget",
			"-q", "-O", "-", "http://"+svc.Spec.ClusterIP+"/")
		if err != nil {
			return fmt.Errorf("pod to Service: %w: %s", err, out)
		}
		return nil
	})
	for _, h := range testenv.Lab().Config.Hosts {
		if h.Role != lab.RoleWorker {
			continue
		}
		testenv.Eventually(t, soon, func() error {
			_, err := fetchBody(testenv.HTTP(testenv.Host(t, "registry")),
				fmt.Sprintf("http://%s:%d/", h.IP, svc.Spec.Ports[0].NodePort))
			if err != nil {
				return fmt.Errorf("outside to node port of %s: %w", h.Name, err)
			}
			_, err = fetchBody(testenv.HTTP(testenv.Host(t, h.Name)), "http://"+svc.Spec.ClusterIP+"/")
			if err != nil {
				return fmt.Errorf("host %s to Service: %w", h.Name, err)
			}
			return nil
		})
	}
}

// F116: a Service without a selector leads to the addresses of its manually written Endpoints.
func TestEndpointsKeptByHand(t *testing.T) {
	w := newNamespace(t)
	w.createWeb(webDeployment("web", 1))
	pod := w.awaitReplicas("web", 1)[0]
	svc := webService("db", v1.ServiceTypeClusterIP)
	svc.Spec.Selector = nil
	svc = w.createService(svc)
	if _, err := w.cs.CoreV1().Endpoints(w.ns).Create(t.Context(),
		&v1.Endpoints{ObjectMeta: metav1.ObjectMeta{Name: "db"}, Subsets: []v1.EndpointSubset{{
			Addresses: []v1.EndpointAddress{{IP: pod.Status.PodIP}},
			Ports:     []v1.EndpointPort{{Name: "http", Port: 8080}}}}}, metav1.CreateOptions{}); err != nil {
		t.Fatal(err)
	}
	testenv.Eventually(t, soon, func() error {
		got, err := fetchBody(testenv.HTTP(testenv.Host(t, "w1")), "http://"+svc.Spec.ClusterIP+"/")
		if err == nil && !strings.Contains(got, pod.Name) {
			err = fmt.Errorf("answered %q", got)
		}
		return err
	})
}

// F22: a pod reaches the API at Service default/kubernetes with its own token.
func TestPodReachesAPI(t *testing.T) {
	w := newNamespace(t)
	w.createPod(sleeperPod("client"))
	w.awaitPod("client", requireReady)
	env := testenv.Kctl(t, "-n", w.ns, "exec", "client", "--", "sh", "-c",
		"echo $KUBERNETES_SERVICE_HOST:$KUBERNETES_SERVICE_PORT; ls /var/run/secrets/kubernetes.io/serviceaccount")
	for _, want := range []string{"10.96.0.1:443", "token", "ca.crt", "namespace"} {
		if !strings.Contains(env, want) {
			t.Errorf("%q is missing in the pod's view: %s", want, env)
		}
	}
	// The API answers plain HTTP with a line that names it: proof of the way there without TLS in the image.
	testenv.Eventually(t, soon, func() error {
		out, err := testenv.Try(t, kubectlPrograms()["kctl"], "-n", w.ns, "exec", "client", "--", "sh", "-c",
			`printf 'GET /api HTTP/1.0\r\n\r\n' | nc -w 3 10.96.0.1 443`)
		if err == nil && !strings.Contains(out, "HTTPS") {
			err = errors.New("an unexpected response")
		}
		if err != nil {
			return fmt.Errorf("pod to 10.96.0.1:443: %w: %s", err, out)
		}
		return nil
	})
	token := strings.TrimSpace(testenv.Kctl(t, "-n", w.ns, "exec", "client", "--", "cat",
		"/var/run/secrets/kubernetes.io/serviceaccount/token"))
	cfg := rest.AnonymousClientConfig(testenv.RestConfig(t))
	cfg.BearerToken = token
	cs, err := newClient(cfg)
	if err != nil {
		t.Fatal(err)
	}
	who, err := cs.AuthenticationV1().SelfSubjectReviews().Create(context.Background(),
		&authenticationv1.SelfSubjectReview{}, metav1.CreateOptions{})
	if err != nil || who.Status.UserInfo.Username != "system:serviceaccount:"+w.ns+":default" {
		t.Errorf("the pod's token is %q, %v", who.Status.UserInfo.Username, err)
	}
}
