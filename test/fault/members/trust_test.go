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

// caRotation is a lab with a rotation of the cluster CA, and the load during the rotation.
type caRotation struct {
	*testing.T
	cs               kubernetes.Interface
	ns               string
	containersBefore map[string]string // containers of the pods before the rotation
	serviceURL       string            // URL of the pods' Service
}

// readAuthorities returns the current certificate authorities of a kubeconfig.
func readAuthorities(file string) (*x509.CertPool, int, error) {
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

// tokenClient returns a client of a replica with a token. It reads the authorities for each
// connection, like a program that reloads ca.crt.
func (e *caRotation) tokenClient(replica, token string) kubernetes.Interface {
	e.Helper()
	h := testenv.Host(e, replica)
	conf := &tls.Config{MinVersion: tls.VersionTLS13, InsecureSkipVerify: true,
		VerifyConnection: func(cs tls.ConnectionState) error {
			pool, _, err := readAuthorities(testenv.Lab().Config.Kubeconfig)
			if err == nil {
				_, err = cs.PeerCertificates[0].Verify(x509.VerifyOptions{Roots: pool, DNSName: h.IP.String()})
			}
			return err
		}}
	cs, err := kubernetes.NewForConfig(&rest.Config{Host: "https://" + h.Endpoint(lab.APIPort), BearerToken: token,
		QPS: -1, Transport: &http.Transport{
			TLSClientConfig: conf, ForceAttemptHTTP2: true,
			DialContext: func(ctx context.Context, _, at string) (net.Conn, error) { return h.Dial(ctx, at) }}})
	if err != nil {
		e.Fatal(err)
	}
	return cs
}

// newToken returns a token of an account with all rights in the test's namespace.
func (e *caRotation) newToken() string {
	e.Helper()
	if _, err := e.cs.RbacV1().RoleBindings(e.ns).Create(e.Context(),
		&rbacv1.RoleBinding{ObjectMeta: metav1.ObjectMeta{Name: "load"},
			RoleRef:  rbacv1.RoleRef{APIGroup: rbacv1.GroupName, Kind: "ClusterRole", Name: "cluster-admin"},
			Subjects: []rbacv1.Subject{{Kind: "ServiceAccount", Namespace: e.ns, Name: "default"}}},
		metav1.CreateOptions{}); err != nil {
		e.Fatal(err)
	}
	got, err := e.cs.CoreV1().ServiceAccounts(e.ns).CreateToken(e.Context(), "default",
		&authenticationv1.TokenRequest{}, metav1.CreateOptions{})
	if err != nil {
		e.Fatal(err)
	}
	return got.Status.Token
}

// createCallers creates a pod on each worker that calls the API with its mounted credentials,
// behind a Service.
func (e *caRotation) createCallers() {
	e.Helper()
	program := filepath.Join(testenv.Build(e, "keelson.dev/keelson/test/fault/members/caller"), "caller")
	testenv.LoadImage(e, callerImage, map[string]string{"caller": program}, "/caller")
	grace := int64(0)
	for _, node := range []string{"w1", "w2"} {
		p := &v1.Pod{ObjectMeta: metav1.ObjectMeta{Name: "caller-" + node, Labels: map[string]string{"app": "caller"}},
			Spec: v1.PodSpec{NodeName: node, TerminationGracePeriodSeconds: &grace,
				Containers: []v1.Container{{Name: "caller", Image: callerImage,
					ReadinessProbe: &v1.Probe{PeriodSeconds: 1, TimeoutSeconds: 10,
						ProbeHandler: v1.ProbeHandler{HTTPGet: &v1.HTTPGetAction{Path: "/",
							Port: intstr.FromInt32(8080)}}}}}}}
		if _, err := e.cs.CoreV1().Pods(e.ns).Create(e.Context(), p, metav1.CreateOptions{}); err != nil {
			e.Fatal(err)
		}
	}
	svc, err := e.cs.CoreV1().Services(e.ns).Create(e.Context(),
		&v1.Service{ObjectMeta: metav1.ObjectMeta{Name: "caller"}, Spec: v1.ServiceSpec{
			Selector: map[string]string{"app": "caller"},
			Ports:    []v1.ServicePort{{Port: 80, TargetPort: intstr.FromInt32(8080)}}}}, metav1.CreateOptions{})
	if err != nil {
		e.Fatal(err)
	}
	e.serviceURL = "http://" + svc.Spec.ClusterIP + "/"
	testenv.Eventually(e, patience, func() error {
		var err error
		e.containersBefore, err = e.readyContainers()
		if err == nil && len(e.containersBefore) != 2 {
			err = fmt.Errorf("ready are %v", e.containersBefore)
		}
		return err
	})
}

// readyContainers returns the containers of the Ready pods, with their restart counts.
func (e *caRotation) readyContainers() (map[string]string, error) {
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

// callerReports returns the pods' reports of their calls.
func (e *caRotation) callerReports() (out []callerReport) {
	e.Helper()
	for name := range e.containersBefore {
		p, err := e.cs.CoreV1().Pods(e.ns).Get(e.Context(), name, metav1.GetOptions{})
		if err != nil {
			e.Fatal(err)
		}
		var one callerReport
		testenv.Eventually(e, patience, func() error {
			return getJSON(e.Context(), testenv.HTTP(testenv.Host(e, p.Spec.NodeName)),
				"http://"+net.JoinHostPort(p.Status.PodIP, "8080")+"/", &one)
		})
		out = append(out, one)
	}
	return out
}

// callerReport is the response of test/fault/members/caller.
type callerReport struct {
	Calls, Failed, Authorities int
	First                      string
}

func getJSON(ctx context.Context, client *http.Client, url string, into any) error {
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

// requestCounter counts requests to the Service from a worker.
type requestCounter struct {
	sync.Mutex
	n      int
	first  error
	failed int
}

func (a *requestCounter) sendRequests(ctx context.Context, client *http.Client, url string) {
	for wait.Delay(ctx, 50*time.Millisecond) == nil {
		var one callerReport
		err := getJSON(context.WithoutCancel(ctx), client, url, &one)
		a.Lock()
		if a.n++; err != nil {
			a.failed++
			if a.first == nil {
				a.first = err
			}
		}
		a.Unlock()
	}
}

// clusterKeys returns the state of the rotation.
func clusterKeys(t *testing.T) (all api.ClusterKeys, err error) {
	t.Helper()
	out, err := runKctl(t, "cluster", "rotate", "--status", "-o", "json")
	if err != nil {
		return all, fmt.Errorf("%w: %s", err, out)
	}
	if err := json.Unmarshal([]byte(out), &all); err != nil || all.Rotation == nil {
		return all, errors.Join(err, errors.New("no exchange is known"))
	}
	return all, nil
}

func (e *caRotation) awaitStep(step string) {
	e.Helper()
	testenv.Eventually(e, patience, func() error {
		all, err := clusterKeys(e.T)
		if err == nil && all.Rotation.Step != step {
			err = fmt.Errorf("the rotation is at step %s and waits for %s", all.Rotation.Step,
				strings.Join(all.Waiting, "; "))
		}
		return err
	})
}

// copyKubeconfig copies the lab's current kubeconfig and returns the path of the copy.
func (e *caRotation) copyKubeconfig(name string) string {
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

// The cluster CA is rotated on a lab while clients at every replica write, read and watch, pods
// call the API with their tokens, and workers send requests to a Service: nothing fails. A
// kubeconfig renewed in time is valid afterwards, and one that was not renewed is refused. Replicas
// and agents serve and store certificates of the new CA only, and the pods have the same
// containers. F51 F94
func TestTheCAIsExchangedUnderLoad(t *testing.T) {
	requireStandby(t)
	e := &caRotation{T: t, cs: testenv.Client(t), ns: testenv.Namespace(t)}
	e.createCallers()
	former, renewed := e.copyKubeconfig("former"), e.copyKubeconfig("renewed")
	token := e.newToken()
	load := &stream.Load{Clients: map[string]kubernetes.Interface{}, Namespace: e.ns, Call: 20 * time.Second}
	for _, name := range testenv.Replicas() {
		load.Names = append(load.Names, name)
		load.Clients[name] = e.tokenClient(name, token)
	}
	ctx, end := context.WithCancel(t.Context())
	defer load.Wait()
	defer end()
	if err := load.Start(ctx); err != nil {
		t.Fatal(err)
	}
	var service requestCounter
	calls, stop := context.WithCancel(ctx)
	var asking sync.WaitGroup
	for _, node := range []string{"w1", "w2"} {
		asking.Go(func() { service.sendRequests(calls, testenv.PatientHTTP(testenv.Host(t, node)), e.serviceURL) })
	}
	defer asking.Wait()
	defer stop()

	began := time.Now()
	// it renews the kubeconfig in use, too
	t.Logf("%s", testenv.Kctl(t, "cluster", "rotate", "cluster-ca", "--keep=1h"))
	e.awaitStep("wait")
	if _, n, err := readAuthorities(testenv.Lab().Config.Kubeconfig); err != nil || n != 2 {
		t.Fatalf("the kubeconfig in use has %d authorities at the step wait, %v", n, err)
	}
	if out, err := runKctl(t, "--kubeconfig="+renewed, "cluster", "renew"); err != nil {
		t.Fatalf("%v: %s", err, out)
	}
	testenv.Eventually(t, patience, func() error { // pods have both in ca.crt
		for _, one := range e.callerReports() {
			if one.Authorities != 2 {
				return fmt.Errorf("a pod has %d authorities in ca.crt", one.Authorities)
			}
		}
		return nil
	})
	testenv.Kctl(t, "cluster", "rotate", "--force") // certificates of the previous CA are not waited for any more
	e.awaitStep("done")
	t.Logf("the exchange took %.1f s", time.Since(began).Seconds())
	stop()
	asking.Wait()
	e.cs = testenv.Client(t) // the previous client trusts only the previous CA
	e.checkLoad(ctx, load, &service)
	e.requireRefused(former)
	if out, err := runKctl(t, "--kubeconfig="+renewed, "get", "nodes"); err != nil {
		t.Errorf("the kubeconfig that was renewed at the step wait: %v: %s", err, out)
	}
	if out, err := runKctl(t, "cluster", "renew"); err != nil { // the former CA goes out of it
		t.Fatalf("%v: %s", err, out)
	}
	e.checkNewCertificates()
}

// checkLoad checks the results of clients, pods and workers.
func (e *caRotation) checkLoad(ctx context.Context, load *stream.Load, service *requestCounter) {
	e.Helper()
	seen, err := load.Finish(ctx)
	if err != nil {
		e.Fatal(err)
	}
	e.Logf("clients: %+v", seen)
	if err := seen.Err(); err != nil {
		e.Error(err)
	}
	e.Logf("the Service: %d requests, %d failed", service.n, service.failed)
	if service.failed > 0 || service.n < 20 {
		e.Errorf("of %d requests to the Service %d failed: %v", service.n, service.failed, service.first)
	}
	for _, one := range e.callerReports() {
		e.Logf("a pod: %+v", one)
		if one.Failed > 0 || one.Calls < 20 {
			e.Errorf("of %d calls of a pod %d failed: %s", one.Calls, one.Failed, one.First)
		}
	}
	now, err := e.readyContainers()
	if err != nil {
		e.Fatal(err)
	}
	for name, was := range e.containersBefore {
		if now[name] != was {
			e.Errorf("pod %s was %s and is %s", name, was, now[name])
		}
	}
}

// requireRefused requires that an old kubeconfig is refused with a message that names the reason.
func (e *caRotation) requireRefused(file string) {
	e.Helper()
	out, err := runKctl(e.T, "--kubeconfig="+file, "get", "nodes")
	e.Logf("the previous kubeconfig: %s", out)
	if err == nil ||
		!strings.Contains(out, "certificate signed by unknown authority\nThe kubeconfig in use does not trust the CA "+
			"of this API. Either the cluster's CA was rotated") {
		e.Errorf("a previous kubeconfig: %v: %s", err, out)
	}
	if out, err := runKctl(e.T, "--kubeconfig="+file, "cluster", "renew"); err == nil ||
		!strings.Contains(out, "does not trust the CA of this API") {
		e.Errorf("a previous kubeconfig is renewed: %v: %s", err, out)
	}
}

// checkNewCertificates checks the certificates of ports and on the disks of agents.
func (e *caRotation) checkNewCertificates() {
	e.Helper()
	pool, n, err := readAuthorities(testenv.Lab().Config.Kubeconfig)
	if err != nil || n != 1 {
		e.Fatalf("the kubeconfig has %d authorities after the exchange, %v", n, err)
	}
	all, err := clusterKeys(e.T)
	if err != nil {
		e.Fatal(err)
	}
	for _, h := range all.Replicas {
		for _, k := range h.Keys {
			if k.Kind == "cluster-ca" && (k.Signs != all.Rotation.New || k.Serves != all.Rotation.New ||
				len(k.Believes) != 1) {
				e.Errorf("replica %s goes by %+v, and the new CA is %s", h.Name, k, all.Rotation.New)
			}
		}
	}
	for _, h := range testenv.Hosts() {
		ports := map[lab.Role][]int{lab.RoleControlPlane: {lab.APIPort, lab.FleetPort}, lab.RoleWorker: {10250}}[h.Role]
		for _, port := range ports {
			testenv.Eventually(e, patience, func() error {
				if err := checkServed(e.Context(), h, port, pool); err != nil {
					return fmt.Errorf("%s at port %d: %w", h.Name, port, err)
				}
				return nil
			})
		}
		if h.Role == lab.RoleWorker {
			// an agent drops the previous CA when it receives the new list
			testenv.Eventually(e, patience, func() error { return checkStored(h, pool) })
		}
	}
}

// checkServed checks the certificate of a port.
func checkServed(ctx context.Context, h lab.Host, port int, pool *x509.CertPool) error {
	conn, err := h.Dial(ctx, h.Endpoint(port))
	if err != nil {
		return err
	}
	defer conn.Close()
	var verified error
	c := tls.Client(conn, &tls.Config{InsecureSkipVerify: true, VerifyConnection: func(cs tls.ConnectionState) error {
		_, verified = cs.PeerCertificates[0].Verify(x509.VerifyOptions{Roots: pool,
			KeyUsages: []x509.ExtKeyUsage{x509.ExtKeyUsageAny}})
		return verified
	}})
	return c.HandshakeContext(ctx)
}

// checkStored checks all certificates on an agent's disk.
func checkStored(h lab.Host, pool *x509.CertPool) error {
	seen, former := 0, error(nil)
	err := filepath.WalkDir(h.DataDir(), func(path string, d fs.DirEntry, err error) error {
		if err != nil || d.IsDir() || !strings.HasSuffix(path, ".crt") && !strings.HasSuffix(path, ".pem") ||
			strings.Contains(path, "/kubelet/") {
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
			if _, err := cert.Verify(x509.VerifyOptions{Roots: pool,
				KeyUsages: []x509.ExtKeyUsage{x509.ExtKeyUsageAny}}); err != nil {
				former = fmt.Errorf("%s has in %s a certificate of %s: %w", h.Name,
					strings.TrimPrefix(path, h.DataDir()), cert.Subject, err)
			}
		}
		return nil
	})
	if err != nil || seen < 2 {
		return fmt.Errorf("%s: %d certificates were looked at, %v", h.Name, seen, err)
	}
	return former
}
