// Package testenv runs tests on a lab. It uses the running lab, or creates a lab for a test package
// and deletes it afterwards.
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
	"keelson.dev/keelson/internal/await"
	"keelson.dev/keelson/internal/wait"
	"keelson.dev/keelson/test/testenv/borrow"
)

// current is the lab of this run.
var current *borrow.Loan

// Main runs a package's tests on a lab of three workers and returns the exit code. If this run
// created the lab, the functions in after run when the tests have finished, before the lab is
// deleted.
func Main(m *testing.M, after ...func() error) int { return MainOf(3, m, after...) }

// MainOf is the same as Main on a lab with at least this number of workers.
func MainOf(workers int, m *testing.M, after ...func() error) int {
	return runOnLab(workers, func(*lab.Config) {}, m, after...)
}

// MainWith is the same as Main on a lab with flags for its replicas, which mount the folder files
// of this machine as /etc/keelson. A lab that is already running is not changed: the tests must
// check Lab().Config for the flags.
func MainWith(flags []string, files string, m *testing.M) int {
	return runOnLab(3, func(c *lab.Config) { c.ControlPlaneFlags, c.ControlPlaneFiles = flags, files }, m)
}

// MainOn is the same as Main on a lab of three workers, with a configuration that change has
// modified before the lab is created. A lab that is already running is not changed: the tests must
// check Lab().Config.
func MainOn(change func(*lab.Config), m *testing.M) int { return runOnLab(3, change, m) }

func runOnLab(workers int, change func(*lab.Config), m *testing.M, after ...func() error) int {
	if os.Geteuid() != 0 {
		fmt.Println("skipped: a lab needs root")
		return 0
	}
	loan, err := borrow.AcquireLab(os.Stdout, workers, change)
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

// Lab returns the lab of this run.
func Lab() *lab.Lab { return current.Lab }

// Owned reports whether this run created the lab. Only then may the tests kill all of it.
func Owned() bool { return current.Owned }

// Host returns a host of the lab by name.
func Host(t testing.TB, name string) lab.Host {
	t.Helper()
	h, err := current.Lab.Host(name)
	if err != nil {
		t.Fatal(err)
	}
	return h
}

// Hosts returns all hosts of the lab.
func Hosts() []lab.Host { return current.Lab.Config.Hosts }

// Client returns a client of the API as the administrator, through the lab's forwarder.
func Client(t testing.TB) kubernetes.Interface {
	t.Helper()
	return clientFor(t, RestConfig(t))
}

// ClientAt returns a client of one replica's API as the administrator.
func ClientAt(t testing.TB, replica string) kubernetes.Interface {
	t.Helper()
	return clientFor(t, dialReplica(t, RestConfig(t), replica))
}

// TokenClientAt returns a client of one replica's API that authenticates with a token.
func TokenClientAt(t testing.TB, replica, token string) kubernetes.Interface {
	t.Helper()
	cfg := rest.AnonymousClientConfig(RestConfig(t))
	cfg.BearerToken = token
	return clientFor(t, dialReplica(t, cfg, replica))
}

// dialReplica changes cfg to dial one replica from the replica's host.
func dialReplica(t testing.TB, cfg *rest.Config, replica string) *rest.Config {
	t.Helper()
	h := Host(t, replica)
	cfg.Host = "https://" + h.Endpoint(lab.APIPort)
	cfg.Dial = func(ctx context.Context, _, address string) (net.Conn, error) { return h.Dial(ctx, address) }
	return cfg
}

// Replicas returns the names of the lab's replicas.
func Replicas() []string {
	var out []string
	for _, h := range current.Lab.Config.Hosts {
		if h.Role == lab.RoleControlPlane {
			out = append(out, h.Name)
		}
	}
	return out
}

// Leader waits until there is a leader, and returns its name and the names of the other replicas.
func Leader(t testing.TB, timeout time.Duration) (name string, others []string) {
	t.Helper()
	Eventually(t, timeout, func() error {
		out, err := Try(t, filepath.Join(current.Lab.Config.BinDir, "kctl"), "cluster", "status", "-o", "json")
		if err != nil {
			return fmt.Errorf("%w: %s", err, out)
		}
		var s api.ClusterStatus
		if err = json.Unmarshal([]byte(out), &s); err == nil && s.Leader == "" {
			err = fmt.Errorf("no leader in the status: %+v", s)
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

// RestConfig returns the administrator's client configuration.
func RestConfig(t testing.TB) *rest.Config {
	t.Helper()
	cfg, err := clientcmd.BuildConfigFromFlags("", current.Lab.Config.Kubeconfig)
	if err != nil {
		t.Fatal(err)
	}
	return cfg
}

// Namespace creates a namespace for one test and deletes it afterwards. It returns when pods can be
// created.
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
			logNamespace(t, created.Name)
		}
		zero := int64(0)
		// A new client: the test may have rotated the CA that the first client trusts.
		err := Client(t).CoreV1().Namespaces().Delete(context.Background(), created.Name,
			metav1.DeleteOptions{GracePeriodSeconds: &zero})
		if err != nil && !apierrors.IsNotFound(err) {
			t.Errorf("deleting namespace %s: %v", created.Name, err)
		}
	})
	// Pods need the default service account, which a controller creates.
	Eventually(t, 2*time.Minute, func() error {
		_, err := cs.CoreV1().ServiceAccounts(created.Name).Get(context.Background(), "default", metav1.GetOptions{})
		return err
	})
	return created.Name
}

// Kctl runs kctl and returns its output. It fails the test if the command fails.
func Kctl(t testing.TB, args ...string) string {
	t.Helper()
	return Must(t, filepath.Join(current.Lab.Config.BinDir, "kctl"), args...)
}

// Must runs a command with the lab's kubeconfig and returns its output. It fails the test if the
// command fails.
func Must(t testing.TB, name string, args ...string) string {
	t.Helper()
	out, err := Try(t, name, args...)
	if err != nil {
		t.Fatalf("%s %s: %v\n%s", filepath.Base(name), strings.Join(args, " "), err, out)
	}
	return out
}

// Try runs a command with the lab's kubeconfig for at most 4 minutes. It returns stdout and stderr
// together.
func Try(t testing.TB, name string, args ...string) (string, error) {
	t.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), 4*time.Minute)
	defer cancel()
	cmd := exec.CommandContext(ctx, name, args...)
	cmd.Env = append(os.Environ(), "KUBECONFIG="+current.Lab.Config.Kubeconfig)
	if name := filepath.Base(name); (name == "kctl" || strings.HasPrefix(name, "kubectl")) &&
		!slices.Contains(args, "lab") {
		// A short-lived command need not collect garbage as often as the daemons that 'kctl lab'
		// starts.
		cmd.Env = append(cmd.Env, "GOGC=400")
	}
	var out bytes.Buffer
	cmd.Stdout, cmd.Stderr = &out, &out
	err := cmd.Run()
	return out.String(), err
}

// Eventually calls cond repeatedly until it returns nil. The time limit is timeout, scaled for a
// slow machine. After that, the test fails with the last error of cond.
func Eventually(t testing.TB, timeout time.Duration, cond func() error) {
	t.Helper()
	await.Until(context.Background(), t, timeout, 25*time.Millisecond, "the lab", cond)
}

// EventuallyWithin is Eventually with an exact limit, for tests of a time bound.
func EventuallyWithin(t testing.TB, limit time.Duration, cond func() error) {
	t.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), limit)
	defer cancel()
	if err := wait.For(ctx, 25*time.Millisecond, cond); err != nil {
		t.Fatalf("after %s: %v", limit, err)
	}
}

// HTTP returns a client that connects from the network namespace of a host. It opens a new
// connection for every request.
func HTTP(h lab.Host) *http.Client {
	return &http.Client{Timeout: 5 * time.Second, Transport: &http.Transport{
		DisableKeepAlives: true,
		DialContext: func(ctx context.Context, _, address string) (net.Conn, error) {
			return h.Dial(ctx, address)
		},
	}}
}

// PatientHTTP is the same as HTTP with a longer timeout, for requests that must all succeed even on
// a busy machine.
func PatientHTTP(h lab.Host) *http.Client {
	c := HTTP(h)
	c.Timeout = 20 * time.Second
	return c
}

// StockKubectl returns the paths of the kubectl binaries that are installed on this machine, if
// any.
func StockKubectl() []string {
	var out []string
	for _, pattern := range []string{"/usr/lib/google-cloud-sdk/bin/kubectl.1.*", "/usr/bin/kubectl",
		"/usr/local/bin/kubectl"} {
		found, _ := filepath.Glob(pattern)
		out = append(out, found...)
	}
	return out
}
