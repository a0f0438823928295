package members

import (
	"context"
	"crypto/tls"
	"crypto/x509"
	"encoding/json"
	"encoding/pem"
	"errors"
	"fmt"
	"io/fs"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	authenticationv1 "k8s.io/api/authentication/v1"
	v1 "k8s.io/api/core/v1"
	rbacv1 "k8s.io/api/rbac/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/util/intstr"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/rest"
	"k8s.io/client-go/tools/clientcmd"

	"keelson.dev/keelson/controlplane/api"
	"keelson.dev/keelson/deploy/lab"
	"keelson.dev/keelson/internal/wait"
	"keelson.dev/keelson/test/testenv"
	"keelson.dev/keelson/test/testenv/stream"
)

const callerImage = "keelson.dev/caller:v1"

// exchange is a lab whose CA is exchanged, and what is at work meanwhile.
type exchange struct {
	*testing.T
	cs   kubernetes.Interface
	ns   string
	pods map[string]string // what the pods' containers were before
	svc  string            // URL of the pods' Service
}

// authorities are those of a kubeconfig, as they are now.
func authorities(file string) (*x509.CertPool, int, error) {
	c, err := clientcmd.LoadFromFile(file)
	if err != nil {
		return nil, 0, err
	}
	pool, n := x509.NewCertPool(), 0
	for _, cluster := range c.Clusters {
		pool.AppendCertsFromPEM(cluster.CertificateAuthorityData)
		n += strings.Count(string(cluster.CertificateAuthorityData), "BEGIN CERTIFICATE")
	}
	return pool, n, nil
}

// bearer is a client at a replica with a token. It looks at the authorities at every connection, as a program does that reads
// ca.crt again.
func (e *exchange) bearer(replica, token string) kubernetes.Interface {
	e.Helper()
	h := testenv.Host(e, replica)
	conf := &tls.Config{MinVersion: tls.VersionTLS13, InsecureSkipVerify: true, VerifyConnection: func(cs tls.ConnectionState) error {
		pool, _, err := authorities(testenv.Lab().Config.Kubeconfig)
		if err == nil {
			_, err = cs.PeerCertificates[0].Verify(x509.VerifyOptions{Roots: pool, DNSName: h.IP.String()})
		}
		return err
	}}
	cs, err := kubernetes.NewForConfig(&rest.Config{Host: "https://" + h.Endpoint(lab.APIPort), BearerToken: token, QPS: -1, Transport: &http.Transport{
		TLSClientConfig: conf, ForceAttemptHTTP2: true, DialContext: func(ctx context.Context, _, at string) (net.Conn, error) { return h.Dial(ctx, at) }}})
	if err != nil {
		e.Fatal(err)
	}
	return cs
}

// token is one of an account that may do everything in the test's namespace.
func (e *exchange) token() string {
	e.Helper()
	if _, err := e.cs.RbacV1().RoleBindings(e.ns).Create(e.Context(), &rbacv1.RoleBinding{ObjectMeta: metav1.ObjectMeta{Name: "load"},
		RoleRef:  rbacv1.RoleRef{APIGroup: rbacv1.GroupName, Kind: "ClusterRole", Name: "cluster-admin"},
		Subjects: []rbacv1.Subject{{Kind: "ServiceAccount", Namespace: e.ns, Name: "default"}}}, metav1.CreateOptions{}); err != nil {
		e.Fatal(err)
	}
	got, err := e.cs.CoreV1().ServiceAccounts(e.ns).CreateToken(e.Context(), "default", &authenticationv1.TokenRequest{}, metav1.CreateOptions{})
	if err != nil {
		e.Fatal(err)
	}
	return got.Status.Token
}

// callers makes a pod on each worker that asks the API with what it has in its files, behind a Service.
func (e *exchange) callers() {
	e.Helper()
	program := filepath.Join(testenv.Build(e, "keelson.dev/keelson/test/fault/members/caller"), "caller")
	testenv.LoadImage(e, callerImage, map[string]string{"caller": program}, "/caller")
	grace := int64(0)
	for _, node := range []string{"w1", "w2"} {
		p := &v1.Pod{ObjectMeta: metav1.ObjectMeta{Name: "caller-" + node, Labels: map[string]string{"app": "caller"}}, Spec: v1.PodSpec{NodeName: node, TerminationGracePeriodSeconds: &grace,
			Containers: []v1.Container{{Name: "caller", Image: callerImage, ReadinessProbe: &v1.Probe{PeriodSeconds: 1, TimeoutSeconds: 10,
				ProbeHandler: v1.ProbeHandler{HTTPGet: &v1.HTTPGetAction{Path: "/", Port: intstr.FromInt32(8080)}}}}}}}
		if _, err := e.cs.CoreV1().Pods(e.ns).Create(e.Context(), p, metav1.CreateOptions{}); err != nil {
			e.Fatal(err)
		}
	}
	svc, err := e.cs.CoreV1().Services(e.ns).Create(e.Context(), &v1.Service{ObjectMeta: metav1.ObjectMeta{Name: "caller"}, Spec: v1.ServiceSpec{
		Selector: map[string]string{"app": "caller"}, Ports: []v1.ServicePort{{Port: 80, TargetPort: intstr.FromInt32(8080)}}}}, metav1.CreateOptions{})
	if err != nil {
		e.Fatal(err)
	}
	e.svc = "http://" + svc.Spec.ClusterIP + "/"
	testenv.Eventually(e, patience, func() error {
		var err error
		e.pods, err = e.containers()
		if err == nil && len(e.pods) != 2 {
			err = fmt.Errorf("ready are %v", e.pods)
		}
		return err
	})
}

// containers are those of the pods that are Ready, with how often they were started.
func (e *exchange) containers() (map[string]string, error) {
	list, err := e.cs.CoreV1().Pods(e.ns).List(e.Context(), metav1.ListOptions{LabelSelector: "app=caller"})
	if err != nil {
		return nil, err
	}
	out := map[string]string{}
	for _, p := range list.Items {
		for _, c := range p.Status.ContainerStatuses {
			if c.Ready {
				out[p.Name] = fmt.Sprintf("%s %s started again %d times", p.UID, c.ContainerID, c.RestartCount)
			}
		}
	}
	return out, nil
}

// told is what the pods say of their calls.
func (e *exchange) told() (out []told) {
	e.Helper()
	for name := range e.pods {
		p, err := e.cs.CoreV1().Pods(e.ns).Get(e.Context(), name, metav1.GetOptions{})
		if err != nil {
			e.Fatal(err)
		}
		var one told
		testenv.Eventually(e, patience, func() error {
			return get(e.Context(), testenv.HTTP(testenv.Host(e, p.Spec.NodeName)), "http://"+net.JoinHostPort(p.Status.PodIP, "8080")+"/", &one)
		})
		out = append(out, one)
	}
	return out
}

// told is as test/fault/members/caller has it.
type told struct {
	Calls, Failed, Authorities int
	First                      string
}

func get(ctx context.Context, client *http.Client, url string, into any) error {
	ctx, cancel := context.WithTimeout(ctx, 20*time.Second)
	defer cancel()
	req, err := http.NewRequestWithContext(ctx, http.MethodGet, url, nil)
	if err != nil {
		return err
	}
	resp, err := client.Do(req)
	if err != nil {
		return err
	}
	defer resp.Body.Close()
	if resp.StatusCode != http.StatusOK {
		return errors.New(resp.Status)
	}
	return json.NewDecoder(resp.Body).Decode(into)
}

// asked counts requests to the Service from a worker.
type asked struct {
	sync.Mutex
	n     int
	first error
	bad   int
}

func (a *asked) run(ctx context.Context, client *http.Client, url string) {
	for wait.Delay(ctx, 50*time.Millisecond) == nil {
		var one told
		err := get(context.WithoutCancel(ctx), client, url, &one)
		a.Lock()
		if a.n++; err != nil {
			a.bad++
			if a.first == nil {
				a.first = err
			}
		}
		a.Unlock()
	}
}

// keys is how far the exchange is.
func keys(t *testing.T) (all api.ClusterKeys, err error) {
	t.Helper()
	out, err := kctl(t, "cluster", "rotate", "--status", "-o", "json")
	if err != nil {
		return all, fmt.Errorf("%w: %s", err, out)
	}
	if err := json.Unmarshal([]byte(out), &all); err != nil || all.Rotation == nil {
		return all, errors.Join(err, errors.New("no exchange is known"))
	}
	return all, nil
}

func (e *exchange) awaits(step string) {
	e.Helper()
	testenv.Eventually(e, patience, func() error {
		all, err := keys(e.T)
		if err == nil && all.Rotation.Step != step {
			err = fmt.Errorf("it is at %s and waits for %s", all.Rotation.Step, strings.Join(all.Waiting, "; "))
		}
		return err
	})
}

// with is a copy of the lab's kubeconfig as it is now.
func (e *exchange) copied(name string) string {
	e.Helper()
	raw, err := os.ReadFile(testenv.Lab().Config.Kubeconfig)
	if err != nil {
		e.Fatal(err)
	}
	file := filepath.Join(e.TempDir(), name)
	if err := os.WriteFile(file, raw, 0o600); err != nil {
		e.Fatal(err)
	}
	return file
}

// The cluster's CA is exchanged on a lab while clients at every replica write, read and watch, pods ask the API with their
// tokens, and workers ask a Service: nothing fails. A kubeconfig that was renewed in time is good afterwards and one that was
// not is refused; what replicas and agents show and keep is by the new CA alone, and the pods are the same containers. F51 F94
func TestTheCAIsExchangedUnderLoad(t *testing.T) {
	needsStandby(t)
	e := &exchange{T: t, cs: testenv.Client(t), ns: testenv.Namespace(t)}
	e.callers()
	former, renewed := e.copied("former"), e.copied("renewed")
	token := e.token()
	load := &stream.Load{Clients: map[string]kubernetes.Interface{}, Namespace: e.ns, Call: 20 * time.Second}
	for _, name := range testenv.Replicas() {
		load.Names = append(load.Names, name)
		load.Clients[name] = e.bearer(name, token)
	}
	ctx, end := context.WithCancel(t.Context())
	defer load.Wait()
	defer end()
	if err := load.Start(ctx); err != nil {
		t.Fatal(err)
	}
	var service asked
	calls, stop := context.WithCancel(ctx)
	var asking sync.WaitGroup
	for _, node := range []string{"w1", "w2"} {
		asking.Go(func() { service.run(calls, testenv.Patient(testenv.Host(t, node)), e.svc) })
	}
	defer asking.Wait()
	defer stop()

	began := time.Now()
	t.Logf("%s", testenv.Kctl(t, "cluster", "rotate", "cluster-ca", "--keep=1h")) // it renews the kubeconfig in use, too
	e.awaits("wait")
	if _, n, err := authorities(testenv.Lab().Config.Kubeconfig); err != nil || n != 2 {
		t.Fatalf("the kubeconfig in use has %d authorities at the step wait, %v", n, err)
	}
	if out, err := kctl(t, "--kubeconfig="+renewed, "cluster", "renew"); err != nil {
		t.Fatalf("%v: %s", err, out)
	}
	testenv.Eventually(t, patience, func() error { // pods have both in ca.crt
		for _, one := range e.told() {
			if one.Authorities != 2 {
				return fmt.Errorf("a pod has %d authorities in ca.crt", one.Authorities)
			}
		}
		return nil
	})
	testenv.Kctl(t, "cluster", "rotate", "--force") // what the former has signed is waited for no more
	e.awaits("done")
	t.Logf("the exchange took %.1f s", time.Since(began).Seconds())
	stop()
	asking.Wait()
	e.cs = testenv.Client(t) // the one of before believes the former CA alone
	e.verdict(ctx, load, &service)
	e.refused(former)
	if out, err := kctl(t, "--kubeconfig="+renewed, "get", "nodes"); err != nil {
		t.Errorf("the kubeconfig that was renewed at the step wait: %v: %s", err, out)
	}
	if out, err := kctl(t, "cluster", "renew"); err != nil { // the former CA goes out of it
		t.Fatalf("%v: %s", err, out)
	}
	e.signedByTheNew()
}

// verdict is what clients, pods and workers met.
func (e *exchange) verdict(ctx context.Context, load *stream.Load, service *asked) {
	e.Helper()
	seen, err := load.Verdict(ctx)
	if err != nil {
		e.Fatal(err)
	}
	e.Logf("clients: %+v", seen)
	if err := seen.Err(); err != nil {
		e.Error(err)
	}
	e.Logf("the Service: %d requests, %d failed", service.n, service.bad)
	if service.bad > 0 || service.n < 20 {
		e.Errorf("of %d requests to the Service %d failed: %v", service.n, service.bad, service.first)
	}
	for _, one := range e.told() {
		e.Logf("a pod: %+v", one)
		if one.Failed > 0 || one.Calls < 20 {
			e.Errorf("of %d calls of a pod %d failed: %s", one.Calls, one.Failed, one.First)
		}
	}
	now, err := e.containers()
	if err != nil {
		e.Fatal(err)
	}
	for name, was := range e.pods {
		if now[name] != was {
			e.Errorf("pod %s was %s and is %s", name, was, now[name])
		}
	}
}

// refused wants a kubeconfig of before to be refused, in a sentence that names the reason.
func (e *exchange) refused(file string) {
	e.Helper()
	out, err := kctl(e.T, "--kubeconfig="+file, "get", "nodes")
	e.Logf("the kubeconfig of before: %s", out)
	if err == nil || !strings.Contains(out, "certificate signed by unknown authority\nThe kubeconfig in use does not trust the CA of this API. Either the cluster's CA was rotated") {
		e.Errorf("a kubeconfig of before: %v: %s", err, out)
	}
	if out, err := kctl(e.T, "--kubeconfig="+file, "cluster", "renew"); err == nil || !strings.Contains(out, "does not trust the CA of this API") {
		e.Errorf("a kubeconfig of before is renewed: %v: %s", err, out)
	}
}

// signedByTheNew looks at what ports show and what agents keep.
func (e *exchange) signedByTheNew() {
	e.Helper()
	pool, n, err := authorities(testenv.Lab().Config.Kubeconfig)
	if err != nil || n != 1 {
		e.Fatalf("the kubeconfig has %d authorities after the exchange, %v", n, err)
	}
	all, err := keys(e.T)
	if err != nil {
		e.Fatal(err)
	}
	for _, h := range all.Replicas {
		for _, k := range h.Keys {
			if k.Kind == "cluster-ca" && (k.Signs != all.Rotation.New || k.Serves != all.Rotation.New || len(k.Believes) != 1) {
				e.Errorf("replica %s goes by %+v, and the new CA is %s", h.Name, k, all.Rotation.New)
			}
		}
	}
	for _, h := range testenv.Hosts() {
		ports := map[lab.Role][]int{lab.RoleControlPlane: {lab.APIPort, lab.FleetPort}, lab.RoleWorker: {10250}}[h.Role]
		for _, port := range ports {
			testenv.Eventually(e, patience, func() error {
				if err := shows(e.Context(), h, port, pool); err != nil {
					return fmt.Errorf("%s at port %d: %w", h.Name, port, err)
				}
				return nil
			})
		}
		if h.Role == lab.RoleWorker {
			testenv.Eventually(e, patience, func() error { return keeps(h, pool) }) // an agent gives the former up when it hears of that
		}
	}
}

// shows looks at the certificate of a port.
func shows(ctx context.Context, h lab.Host, port int, pool *x509.CertPool) error {
	conn, err := h.Dial(ctx, h.Endpoint(port))
	if err != nil {
		return err
	}
	defer conn.Close()
	var verified error
	c := tls.Client(conn, &tls.Config{InsecureSkipVerify: true, VerifyConnection: func(cs tls.ConnectionState) error {
		_, verified = cs.PeerCertificates[0].Verify(x509.VerifyOptions{Roots: pool, KeyUsages: []x509.ExtKeyUsage{x509.ExtKeyUsageAny}})
		return verified
	}})
	return c.HandshakeContext(ctx)
}

// keeps looks at all certificates on an agent's disk.
func keeps(h lab.Host, pool *x509.CertPool) error {
	seen, former := 0, error(nil)
	err := filepath.WalkDir(h.DataDir(), func(path string, d fs.DirEntry, err error) error {
		if err != nil || d.IsDir() || !strings.HasSuffix(path, ".crt") && !strings.HasSuffix(path, ".pem") || strings.Contains(path, "/kubelet/") {
			return nil // files of pods come and go
		}
		raw, err := os.ReadFile(path)
		if err != nil {
			return err
		}
		for block, rest := pem.Decode(raw); block != nil; block, rest = pem.Decode(rest) {
			cert, err := x509.ParseCertificate(block.Bytes)
			if err != nil {
				continue // a key
			}
			seen++
			if _, err := cert.Verify(x509.VerifyOptions{Roots: pool, KeyUsages: []x509.ExtKeyUsage{x509.ExtKeyUsageAny}}); err != nil {
				former = fmt.Errorf("%s has in %s a certificate of %s: %w", h.Name, strings.TrimPrefix(path, h.DataDir()), cert.Subject, err)
			}
		}
		return nil
	})
	if err != nil || seen < 2 {
		return fmt.Errorf("%s: %d certificates were looked at, %v", h.Name, seen, err)
	}
	return former
}
