package probe

import (
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/url"
	"strconv"
	"strings"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/grpc/health/grpc_health_v1"
	"google.golang.org/grpc/status"
	v1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/util/intstr"
	cri "k8s.io/cri-api/pkg/apis/runtime/v1"
	"k8s.io/utils/ptr"

	"keelson.dev/keelson/agent"
)

const (
	userAgent  = "kube-probe/1.37" // applications recognize probes by this user agent
	maxBody    = 10 << 10
	maxHeaders = 64 << 10
	maxMessage = 256
)

// probeRunner runs single exec, HTTP, TCP and gRPC probes.
type probeRunner struct {
	runtime agent.Runtime
	http    *http.Client
}

func newProbeRunner(r agent.Runtime) *probeRunner {
	// Pods use self-signed certificates. A probe tests availability, not identity.
	t := &http.Transport{TLSClientConfig: &tls.Config{InsecureSkipVerify: true}, DisableKeepAlives: true,
		DisableCompression: true, MaxResponseHeaderBytes: maxHeaders}
	return &probeRunner{runtime: r,
		http: &http.Client{Transport: t, CheckRedirect: func(req *http.Request, via []*http.Request) error {
			if req.URL.Hostname() != via[0].URL.Hostname() {
				return http.ErrUseLastResponse // a redirect out of the pod is not followed: the pod has responded
			}
			if len(via) >= 10 {
				return errors.New("stopped after 10 redirects")
			}
			return nil
		}}}
}

// probeWarning is the error of a probe that succeeded with a warning.
type probeWarning string

func (w probeWarning) Error() string { return string(w) }

// runProbe runs one probe of a container. It returns whether the probe succeeded, and its message.
// err is a probeWarning if the probe succeeded with a warning; any other error means that the probe
// could not be run.
func (a *probeRunner) runProbe(ctx context.Context, p *v1.Probe, t agent.ProbeTarget) (
	ok bool, message string, err error,
) {
	switch {
	case p.Exec != nil:
		return a.runExec(ctx, p, t)
	case p.HTTPGet != nil:
		return a.runHTTP(ctx, p, t)
	case p.TCPSocket != nil:
		host := p.TCPSocket.Host
		if host == "" {
			host = t.IP
		}
		port, err := resolvePort(t.Container, p.TCPSocket.Port)
		if err != nil {
			return false, "", err
		}
		var d net.Dialer
		conn, err := d.DialContext(ctx, "tcp", net.JoinHostPort(host, strconv.Itoa(port)))
		if err != nil {
			return false, err.Error(), nil
		}
		return true, "", conn.Close()
	case p.GRPC != nil:
		return a.runGRPC(ctx, p, t)
	}
	return false, "", fmt.Errorf("probe of container %q has no action", t.Container.Name)
}

func (a *probeRunner) runExec(ctx context.Context, p *v1.Probe, t agent.ProbeTarget) (bool, string, error) {
	limit := secondsOrDefault(p.TimeoutSeconds, 1)
	res, err := a.runtime.ExecSync(ctx, &cri.ExecSyncRequest{ContainerId: t.ContainerID, Cmd: p.Exec.Command,
		Timeout: int64(limit / time.Second)})
	switch {
	case ctx.Err() != nil, status.Code(err) == codes.DeadlineExceeded, errors.Is(err, context.DeadlineExceeded):
		return false, fmt.Sprintf("command timed out: %q timed out after %s", strings.Join(p.Exec.Command, " "), limit),
			nil
	case err != nil:
		return false, "", fmt.Errorf("exec probe: %w", err)
	}
	out := string(res.Stdout) + string(res.Stderr)
	return res.ExitCode == 0, truncate(out, maxBody), nil
}

func (a *probeRunner) runHTTP(ctx context.Context, p *v1.Probe, t agent.ProbeTarget) (bool, string, error) {
	g := p.HTTPGet
	number, err := resolvePort(t.Container, g.Port)
	if err != nil {
		return false, "", err
	}
	host := g.Host
	if host == "" {
		host = t.IP
	}
	u, err := url.Parse(g.Path)
	if err != nil {
		u = &url.URL{Path: g.Path}
	}
	u.Scheme, u.Host = strings.ToLower(string(g.Scheme)), net.JoinHostPort(host, strconv.Itoa(number))
	if u.Scheme == "" {
		u.Scheme = "http"
	}
	req, err := http.NewRequestWithContext(ctx, http.MethodGet, u.String(), nil)
	if err != nil {
		return false, "", fmt.Errorf("HTTP probe: %w", err)
	}
	req.Header.Set("User-Agent", userAgent)
	req.Header.Set("Accept", "*/*")
	for _, h := range g.HTTPHeaders {
		switch {
		case strings.EqualFold(h.Name, "Host"):
			req.Host = h.Value
		case h.Value == "" && (strings.EqualFold(h.Name, "User-Agent") || strings.EqualFold(h.Name, "Accept")):
			req.Header[http.CanonicalHeaderKey(h.Name)] = nil // an empty value removes the default header
		default:
			req.Header.Set(h.Name, h.Value)
		}
	}
	res, err := a.http.Do(req)
	if err != nil {
		return false, err.Error(), nil
	}
	defer res.Body.Close()
	body, err := io.ReadAll(io.LimitReader(res.Body, maxBody))
	if err != nil && len(body) == 0 && ctx.Err() != nil {
		return false, err.Error(), nil
	}
	if res.StatusCode < 200 || res.StatusCode >= 400 {
		return false, fmt.Sprintf("HTTP probe failed with statuscode: %d", res.StatusCode), nil
	}
	if res.StatusCode >= 300 { // a redirect to another host, which is not followed
		return true, "", probeWarning("Probe terminated redirects, Response body: " + string(body))
	}
	return true, truncate(string(body), maxMessage), nil
}

func (a *probeRunner) runGRPC(ctx context.Context, p *v1.Probe, t agent.ProbeTarget) (bool, string, error) {
	addr := net.JoinHostPort(t.IP, strconv.Itoa(int(p.GRPC.Port)))
	conn, err := grpc.NewClient("passthrough:///"+addr, grpc.WithTransportCredentials(insecure.NewCredentials()),
		grpc.WithUserAgent(userAgent), grpc.WithNoProxy(),
		grpc.WithMaxHeaderListSize(maxHeaders), grpc.WithDefaultCallOptions(grpc.MaxCallRecvMsgSize(maxBody)))
	if err != nil {
		return false, "", fmt.Errorf("gRPC probe: %w", err)
	}
	defer conn.Close()
	service := ptr.Deref(p.GRPC.Service, "")
	res, err := grpc_health_v1.NewHealthClient(conn).Check(ctx, &grpc_health_v1.HealthCheckRequest{Service: service})
	if err != nil {
		switch status.Code(err) {
		case codes.Unimplemented:
			return false,
				fmt.Sprintf("error: this server does not implement the grpc health protocol "+
					"(grpc.health.v1.Health): %s", status.Convert(err).Message()), nil
		case codes.DeadlineExceeded:
			return false, fmt.Sprintf("timeout: health rpc did not complete within %s",
				secondsOrDefault(p.TimeoutSeconds, 1)), nil
		default:
			return false, fmt.Sprintf("error: health rpc failed: %v", err), nil
		}
	}
	if res.Status != grpc_health_v1.HealthCheckResponse_SERVING {
		return false, fmt.Sprintf("service unhealthy (responded with %q)", res.Status), nil
	}
	return true, "", nil
}

// resolvePort returns the port number of p, which is a number or the name of one of the container's
// ports.
func resolvePort(c *v1.Container, p intstr.IntOrString) (int, error) {
	n := p.IntValue()
	if p.Type == intstr.String {
		n = 0
		for _, cp := range c.Ports {
			if cp.Name == p.StrVal {
				n = int(cp.ContainerPort)
			}
		}
		if n == 0 {
			if v, err := strconv.Atoi(p.StrVal); err == nil {
				n = v
			}
		}
	}
	if n < 1 || n > 65535 {
		return 0, fmt.Errorf("couldn't find port: %v in container %q", p.String(), c.Name)
	}
	return n, nil
}

func truncate(s string, n int) string {
	if len(s) > n {
		return s[:n]
	}
	return s
}
