package e2e

import (
	"bufio"
	"bytes"
	"context"
	"crypto/tls"
	"encoding/hex"
	"fmt"
	"io"
	"net"
	"net/http"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/credentials"
	"google.golang.org/grpc/status"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/rest"

	"keelson.dev/keelson/deploy/lab"
	storev1 "keelson.dev/keelson/proto/store/v1"
	"keelson.dev/keelson/test/testenv"
)

// listeningPorts returns the TCP ports on which processes of a host listen, except on loopback
// addresses.
func listeningPorts(t *testing.T, host string) (ports []int) {
	t.Helper()
	for _, table := range []string{"/proc/net/tcp", "/proc/net/tcp6"} {
		out, err := testenv.Host(t, host).Command(t.Context(), "cat", table).Output()
		if err != nil {
			t.Fatalf("%s: %v", host, err)
		}
		lines := bufio.NewScanner(bytes.NewReader(out))
		for lines.Scan() {
			f := strings.Fields(lines.Text())
			if len(f) < 4 || f[3] != "0A" { // LISTEN
				continue
			}
			ip, port, _ := strings.Cut(f[1], ":")
			n, err := strconv.ParseUint(port, 16, 16)
			if err != nil {
				t.Fatal(err)
			}
			if raw, err := hex.DecodeString(ip); err == nil && len(raw) == 4 && raw[3] == 127 {
				continue
			}
			if !slices.Contains(ports, int(n)) {
				ports = append(ports, int(n))
			}
		}
	}
	slices.Sort(ports)
	return ports
}

// State can be written only through the API. At every other port of every host, neither an
// unauthenticated client nor the administrator nor a worker can write, by requests of the API or of
// the store. Workers have no store port. F19
func TestOnlyTheAPITakesState(t *testing.T) {
	w := newNamespace(t)
	admin, err := rest.TLSConfigFor(testenv.RestConfig(t))
	if err != nil {
		t.Fatal(err)
	}
	stranger := &tls.Config{InsecureSkipVerify: true} // this client does not verify the server
	admin.InsecureSkipVerify = true
	raw, err := testenv.Host(t, "w1").Command(t.Context(), "cat", "/var/lib/keelson/session/node.pem").Output()
	if err != nil {
		t.Fatal(err)
	}
	pair, err := tls.X509KeyPair(raw, raw)
	if err != nil {
		t.Fatal(err)
	}
	worker := &tls.Config{InsecureSkipVerify: true, Certificates: []tls.Certificate{pair}}
	asked := 0
	for _, h := range testenv.Hosts() {
		if h.Role == lab.RoleRegistry { // of images, for tests
			continue
		}
		var ports []int
		// names, for its own pods, the agent's own server, and the health of Service rules
		want := []int{53, 10250, 10256}
		if h.Role == lab.RoleControlPlane {
			want = []int{lab.APIPort, lab.FleetPort, lab.PeerPort}
		}
		testenv.Eventually(t, soon, func() error {
			// a pod of the test before may be about to end, and a daemon to begin
			if ports = listeningPorts(t, h.Name); !slices.Equal(ports, want) {
				return fmt.Errorf("%s listens at %v, want %v", h.Name, ports, want)
			}
			return nil
		})
		for _, port := range ports {
			if h.Role == lab.RoleControlPlane && port == lab.APIPort {
				continue
			}
			for who, as := range map[string]*tls.Config{"a stranger": stranger, "the administrator": admin,
				"a worker": worker} {
				asked++
				if got := w.postConfigMap(h, port, as); got/100 == 2 {
					t.Errorf("%s:%d took an object of %s: %d", h.Name, port, who, got)
				}
				if err := commitAsReplica(t, h, port, as); err != nil {
					t.Errorf("%s:%d, commit requested by %s: %v", h.Name, port, who, err)
				}
			}
		}
	}
	testenv.Eventually(t, soon, func() error { // a controller creates the expected object
		list, err := w.cs.CoreV1().ConfigMaps(w.ns).List(context.Background(), metav1.ListOptions{})
		if err == nil && (len(list.Items) != 1 || list.Items[0].Name != "kube-root-ca.crt") {
			err = fmt.Errorf("there are %d objects", len(list.Items))
		}
		return err
	})
	if asked < 6 {
		t.Errorf("%d ports were checked", asked/3)
	}
	// and the same request is taken by the API: it is where it goes that keeps the others out
	if got := w.postConfigMap(testenv.Host(t, "cp1"), lab.APIPort, admin); got != http.StatusCreated {
		t.Errorf("the API responds with %d", got)
	}
}

// postConfigMap requests the creation of a ConfigMap at a port of a host and returns the status
// code, or 0 if there is no response.
func (w testNamespace) postConfigMap(h lab.Host, port int, as *tls.Config) int {
	w.Helper()
	as = as.Clone()
	as.NextProtos = []string{"http/1.1"}
	client := &http.Client{Timeout: time.Minute,
		Transport: &http.Transport{DisableKeepAlives: true, TLSClientConfig: as,
			DialContext: func(ctx context.Context, _, address string) (net.Conn, error) {
				return h.Dial(ctx, address)
			}}}
	body := strings.NewReader(`{"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": "slipped-in"}}`)
	res, err := client.Post(fmt.Sprintf("https://%s:%d/api/v1/namespaces/%s/configmaps", h.IP, port, w.ns),
		"application/json", body)
	if err != nil {
		return 0
	}
	defer res.Body.Close()
	_, _ = io.Copy(io.Discard, io.LimitReader(res.Body, 1<<16))
	return res.StatusCode
}

// commitAsReplica sends a commit to the store at a port of a host, as replicas do. It returns an
// error if a store responds.
func commitAsReplica(t *testing.T, h lab.Host, port int, as *tls.Config) error {
	t.Helper()
	conn, err := grpc.NewClient("passthrough:///"+net.JoinHostPort(h.IP.String(), strconv.Itoa(port)),
		grpc.WithTransportCredentials(credentials.NewTLS(as.Clone())),
		grpc.WithContextDialer(func(ctx context.Context, address string) (net.Conn, error) {
			return h.Dial(ctx, address)
		}))
	if err != nil {
		t.Fatal(err)
	}
	defer conn.Close()
	ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
	defer cancel()
	_, err = storev1.NewPeerClient(conn).Forward(ctx, &storev1.ForwardRequest{})
	switch status.Code(err) {
	case codes.Unavailable, codes.Unimplemented, codes.Unauthenticated, codes.PermissionDenied:
		return nil // refused, or not an HTTP port
	}
	return fmt.Errorf("a store answers: %w", err)
}
