package pod

import (
	"context"
	"crypto/tls"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/url"
	"strconv"
	"strings"
	"time"

	v1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/util/intstr"
	cri "k8s.io/cri-api/pkg/apis/runtime/v1"
)

// hook runs a lifecycle handler and waits for its result.
func (w *worker) hook(ctx context.Context, pod *v1.Pod, spec *v1.Container, id string, h *v1.LifecycleHandler) error {
	switch {
	case h.Exec != nil:
		res, err := w.cfg.Runtime.ExecSync(ctx, &cri.ExecSyncRequest{ContainerId: id, Cmd: h.Exec.Command})
		if err != nil {
			return fmt.Errorf("exec hook of container %q: %w", spec.Name, err)
		}
		if res.ExitCode != 0 {
			return fmt.Errorf("command '%s' exited with %d: %s", strings.Join(h.Exec.Command, " "), res.ExitCode, res.Stderr)
		}
		return nil
	case h.HTTPGet != nil:
		return w.httpHook(ctx, pod, spec, h.HTTPGet)
	case h.Sleep != nil:
		t := time.NewTimer(time.Duration(h.Sleep.Seconds) * time.Second)
		defer t.Stop()
		select {
		case <-ctx.Done():
			return ctx.Err()
		case <-t.C:
			return nil
		}
	case h.TCPSocket != nil:
		// Validation accepts tcpSocket for old manifests, but no implementation has ever run it.
		return nil
	}
	return fmt.Errorf("hook of container %q has no action", spec.Name)
}

func (w *worker) httpHook(ctx context.Context, pod *v1.Pod, spec *v1.Container, g *v1.HTTPGetAction) error {
	host := g.Host
	if host == "" {
		host = pod.Status.PodIP
	}
	port, err := hookPort(spec, g.Port)
	if err != nil {
		return err
	}
	scheme := strings.ToLower(string(g.Scheme))
	if scheme == "" {
		scheme = "http"
	}
	u, err := url.Parse(g.Path)
	if err != nil {
		return fmt.Errorf("hook of container %q: path %q: %w", spec.Name, g.Path, err)
	}
	u.Scheme, u.Host = scheme, net.JoinHostPort(host, strconv.Itoa(port))
	req, err := http.NewRequestWithContext(ctx, http.MethodGet, u.String(), nil)
	if err != nil {
		return fmt.Errorf("hook of container %q: %w", spec.Name, err)
	}
	for _, hd := range g.HTTPHeaders {
		if strings.EqualFold(hd.Name, "Host") {
			req.Host = hd.Value
		}
		req.Header.Add(hd.Name, hd.Value)
	}
	// Pods serve self-signed certificates. The response status is ignored, as documented for hooks.
	client := &http.Client{Transport: &http.Transport{TLSClientConfig: &tls.Config{InsecureSkipVerify: true}, DisableKeepAlives: true}}
	res, err := client.Do(req)
	if err != nil {
		return fmt.Errorf("HTTP hook of container %q: %w", spec.Name, err)
	}
	defer res.Body.Close()
	_, err = io.Copy(io.Discard, io.LimitReader(res.Body, 1<<20))
	return err
}

func hookPort(spec *v1.Container, p intstr.IntOrString) (int, error) {
	if p.Type == intstr.Int {
		return p.IntValue(), nil
	}
	for _, c := range spec.Ports {
		if c.Name == p.StrVal {
			return int(c.ContainerPort), nil
		}
	}
	if n, err := strconv.Atoi(p.StrVal); err == nil {
		return n, nil
	}
	return 0, fmt.Errorf("hook of container %q: no port named %q", spec.Name, p.StrVal)
}
