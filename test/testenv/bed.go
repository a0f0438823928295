// Package testenv is the lab as a test bed: it finds the lab that is up, or makes
// one for the run of a test package and takes it away afterwards.
package testenv

import (
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"net"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	v1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/rest"
	"k8s.io/client-go/tools/clientcmd"

	"keelson.dev/keelson/controlplane/api"
	"keelson.dev/keelson/deploy/lab"
	"keelson.dev/keelson/internal/wait"
	"keelson.dev/keelson/test/testenv/borrow"
)

// The lab of this run.
var current *borrow.Loan

// Main runs a package's tests on a lab of three workers. Its result is the exit code.
func Main(m *testing.M, after ...func() error) int { return MainOf(3, m, after...) }

// MainOf is Main on a lab of so many workers.
func MainOf(workers int, m *testing.M, after ...func() error) int {
	return on(workers, func(*lab.Config) {}, m, after...)
}

// MainWith is Main on a lab whose replicas run with flags and see a folder of this machine as /etc/keelson. A lab that is
// up already stays as it is: the tests ask Lab().Config whether it has the flags.
func MainWith(flags []string, files string, m *testing.M) int {
	return on(3, func(c *lab.Config) { c.ControlPlaneFlags, c.ControlPlaneFiles = flags, files }, m)
}

// MainOn is Main on a lab of three workers that is changed before it is made. A lab that is up already stays as it is: the
// tests ask Lab().Config whether it is what they need.
func MainOn(change func(*lab.Config), m *testing.M) int { return on(3, change, m) }

func on(workers int, change func(*lab.Config), m *testing.M, after ...func() error) int {
	if os.Geteuid() != 0 {
		fmt.Println("skipped: a lab needs root")
		return 0
	}
	loan, err := borrow.Lab(os.Stdout, workers, change)
	if err != nil {
		fmt.Fprintln(os.Stderr, "no lab:", err)
		return 1
	}
	current = loan
	code := m.Run()
	if !current.Owned {
		return code
	}
	if code != 0 {
		Diagnose(os.Stderr)
	}
	for _, f := range after {
		if err := f(); err != nil {
			fmt.Fprintln(os.Stderr, err)
			code = 1
		}
	}
	if err := current.Return(); err != nil {
		fmt.Fprintln(os.Stderr, "FAIL:", err)
		code = 1
	}
	return code
}

// Lab is the lab of this run; Owned says whether the run made it (and may kill all of it).
func Lab() *lab.Lab { return current.Lab }

// Owned says whether this run made the lab.
func Owned() bool { return current.Owned }

// Host is a host of the lab.
func Host(t testing.TB, name string) lab.Host {
	t.Helper()
	h, err := current.Host(name)
	if err != nil {
		t.Fatal(err)
	}
	return h
}

// Hosts are all hosts of the lab.
func Hosts() []lab.Host { return current.Config.Hosts }

// Client talks to the API through the forwarder, as the administrator.
func Client(t testing.TB) kubernetes.Interface {
	t.Helper()
	return clientFor(t, RestConfig(t))
}

// ClientAt talks to one replica directly.
func ClientAt(t testing.TB, replica string) kubernetes.Interface {
	t.Helper()
	return clientFor(t, at(t, RestConfig(t), replica))
}

// TokenClientAt talks to one replica directly, as whom a token is for.
func TokenClientAt(t testing.TB, replica, token string) kubernetes.Interface {
	t.Helper()
	cfg := rest.AnonymousClientConfig(RestConfig(t))
	cfg.BearerToken = token
	return clientFor(t, at(t, cfg, replica))
}

// at has a client's connections begin on a replica's host.
func at(t testing.TB, cfg *rest.Config, replica string) *rest.Config {
	t.Helper()
	h := Host(t, replica)
	cfg.Host = "https://" + h.Endpoint(lab.APIPort)
	cfg.Dial = func(ctx context.Context, _, address string) (net.Conn, error) { return h.Dial(ctx, address) }
	return cfg
}

// Replicas are the names of the lab's replicas.
func Replicas() []string {
	var out []string
	for _, h := range current.Config.Hosts {
		if h.Role == lab.RoleControlPlane {
			out = append(out, h.Name)
		}
	}
	return out
}

// Leader waits for a replica to lead, and returns its name and those of the others.
func Leader(t testing.TB, timeout time.Duration) (name string, others []string) {
	t.Helper()
	Eventually(t, timeout, func() error {
		out, err := Try(t, filepath.Join(current.Config.BinDir, "kctl"), "cluster", "status", "-o", "json")
		if err != nil {
			return fmt.Errorf("%w: %s", err, out)
		}
		var s api.ClusterStatus
		if err = json.Unmarshal([]byte(out), &s); err == nil && s.Leader == "" {
			err = fmt.Errorf("no leader in: %+v", s)
		}
		name = s.Leader
		return err
	})
	for _, r := range Replicas() {
		if r != name {
			others = append(others, r)
		}
	}
	return name, others
}

func clientFor(t testing.TB, cfg *rest.Config) kubernetes.Interface {
	t.Helper()
	cfg.QPS, cfg.Burst = -1, 0
	cs, err := kubernetes.NewForConfig(cfg)
	if err != nil {
		t.Fatal(err)
	}
	return cs
}

// RestConfig is the administrator's.
func RestConfig(t testing.TB) *rest.Config {
	t.Helper()
	cfg, err := clientcmd.BuildConfigFromFlags("", current.Config.Kubeconfig)
	if err != nil {
		t.Fatal(err)
	}
	return cfg
}

// Namespace makes a namespace for one test and deletes it afterwards.
func Namespace(t testing.TB) string {
	t.Helper()
	name := strings.ToLower(strings.NewReplacer("/", "-", "_", "-", ".", "-").Replace(t.Name()))
	if len(name) > 50 {
		name = name[:50]
	}
	cs := Client(t)
	created, err := cs.CoreV1().Namespaces().Create(context.Background(), &v1.Namespace{
		ObjectMeta: metav1.ObjectMeta{GenerateName: strings.Trim(name, "-") + "-"},
	}, metav1.CreateOptions{})
	if err != nil {
		t.Fatalf("making a namespace: %v", err)
	}
	t.Cleanup(func() {
		if t.Failed() {
			describe(t, created.Name)
		}
		zero := int64(0)
		// By a client of now: the test may have exchanged the CA that the first one believes.
		err := Client(t).CoreV1().Namespaces().Delete(context.Background(), created.Name, metav1.DeleteOptions{GracePeriodSeconds: &zero})
		if err != nil && !apierrors.IsNotFound(err) {
			t.Errorf("deleting namespace %s: %v", created.Name, err)
		}
	})
	// The default service account is a controller's work; pods need it.
	Eventually(t, 2*time.Minute, func() error {
		_, err := cs.CoreV1().ServiceAccounts(created.Name).Get(context.Background(), "default", metav1.GetOptions{})
		return err
	})
	return created.Name
}

// Kctl runs the project's own command line and returns what it prints; it must succeed.
func Kctl(t testing.TB, args ...string) string {
	t.Helper()
	return Must(t, filepath.Join(current.Config.BinDir, "kctl"), args...)
}

// Must runs a command with the lab's kubeconfig; it must succeed.
func Must(t testing.TB, name string, args ...string) string {
	t.Helper()
	out, err := Try(t, name, args...)
	if err != nil {
		t.Fatalf("%s %s: %v\n%s", filepath.Base(name), strings.Join(args, " "), err, out)
	}
	return out
}

// Try runs a command with the lab's kubeconfig and returns both outputs together.
func Try(t testing.TB, name string, args ...string) (string, error) {
	t.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), 4*time.Minute)
	defer cancel()
	cmd := exec.CommandContext(ctx, name, args...)
	cmd.Env = append(os.Environ(), "KUBECONFIG="+current.Config.Kubeconfig)
	if name := filepath.Base(name); (name == "kctl" || strings.HasPrefix(name, "kubectl")) && !slices.Contains(args, "lab") {
		// A command of a moment need not collect its garbage as often as what runs for years, as what 'kctl lab' starts does.
		cmd.Env = append(cmd.Env, "GOGC=400")
	}
	var out bytes.Buffer
	cmd.Stdout, cmd.Stderr = &out, &out
	err := cmd.Run()
	return out.String(), err
}

// Eventually waits until cond returns nil, and fails the test with its last error otherwise.
func Eventually(t testing.TB, timeout time.Duration, cond func() error) {
	t.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), timeout)
	defer cancel()
	if err := wait.For(ctx, 25*time.Millisecond, cond); err != nil {
		t.Fatalf("after %s: %v", timeout, err)
	}
}

// HTTP is a client whose connections begin on a host. Every request has a connection of its own.
func HTTP(h lab.Host) *http.Client {
	return &http.Client{Timeout: 5 * time.Second, Transport: &http.Transport{
		DisableKeepAlives: true,
		DialContext:       func(ctx context.Context, _, address string) (net.Conn, error) { return h.Dial(ctx, address) },
	}}
}

// Patient is HTTP for requests of which none may fail, also on a machine that does much else: a slow answer is no lost one.
func Patient(h lab.Host) *http.Client {
	c := HTTP(h)
	c.Timeout = 20 * time.Second
	return c
}

// StockKubectl lists the kubectl binaries of the machine by path; may be empty.
func StockKubectl() []string {
	var out []string
	for _, pattern := range []string{"/usr/lib/google-cloud-sdk/bin/kubectl.1.*", "/usr/bin/kubectl", "/usr/local/bin/kubectl"} {
		found, _ := filepath.Glob(pattern)
		out = append(out, found...)
	}
	return out
}
