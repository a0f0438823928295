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

// runHook runs a postStart or preStop handler of a container and waits for its result.
func (ar *actionRunner) runHook(ctx context.Context, pod *v1.Pod, spec *v1.Container, id string,
	handler *v1.LifecycleHandler) error {
	switch {
	case handler.Exec != nil:
		res, err := ar.w.cfg.Deps.Runtime.ExecSync(ctx,
			&cri.ExecSyncRequest{ContainerId: id, Cmd: handler.Exec.Command})
		if err != nil {
			return fmt.Errorf("exec hook of container %q: %w", spec.Name, err)
		}
		if res.ExitCode != 0 {
			return fmt.Errorf("command '%s' exited with %d: %s", strings.Join(handler.Exec.Command, " "),
				res.ExitCode, res.Stderr)
		}
		return nil
	case handler.HTTPGet != nil:
		return ar.runHTTPHook(ctx, pod, spec, handler.HTTPGet)
	case handler.Sleep != nil:
		t := time.NewTimer(time.Duration(handler.Sleep.Seconds) * time.Second)
		defer t.Stop()
		select {
		case <-ctx.Done():
			return ctx.Err()
		case <-t.C:
			return nil
		}
	case handler.TCPSocket != nil:
		// Validation accepts tcpSocket for old manifests, but no implementation has ever run it.
		return nil
	}
	return fmt.Errorf("hook of container %q has no action", spec.Name)
}

func (ar *actionRunner) runHTTPHook(ctx context.Context, pod *v1.Pod, spec *v1.Container, get *v1.HTTPGetAction) error {
	host := get.Host
	if host == "" {
		host = pod.Status.PodIP
	}
	port, err := resolveHookPort(spec, get.Port)
	if err != nil {
		return err
	}
	scheme := strings.ToLower(string(get.Scheme))
	if scheme == "" {
		scheme = "http"
	}
	u, err := url.Parse(get.Path)
	if err != nil {
		return fmt.Errorf("hook of container %q: path %q: %w", spec.Name, get.Path, err)
	}
	u.Scheme, u.Host = scheme, net.JoinHostPort(host, strconv.Itoa(port))
	req, err := http.NewRequestWithContext(ctx, http.MethodGet, u.String(), nil)
	if err != nil {
		return fmt.Errorf("hook of container %q: %w", spec.Name, err)
	}
	for _, hd := range get.HTTPHeaders {
		if strings.EqualFold(hd.Name, "Host") {
			req.Host = hd.Value
		}
		req.Header.Add(hd.Name, hd.Value)
	}
	// Pods serve self-signed certificates. The response status is ignored, as documented for hooks.
	client := &http.Client{Transport: &http.Transport{TLSClientConfig: &tls.Config{InsecureSkipVerify: true},
		DisableKeepAlives: true}}
	res, err := client.Do(req)
	if err != nil {
		return fmt.Errorf("HTTP hook of container %q: %w", spec.Name, err)
	}
	defer res.Body.Close()
	_, err = io.Copy(io.Discard, io.LimitReader(res.Body, 1<<20))
	return err
}

func resolveHookPort(spec *v1.Container, port intstr.IntOrString) (int, error) {
	if port.Type == intstr.Int {
		return port.IntValue(), nil
	}
	for _, c := range spec.Ports {
		if c.Name == port.StrVal {
			return int(c.ContainerPort), nil
		}
	}
	if n, err := strconv.Atoi(port.StrVal); err == nil {
		return n, nil
	}
	return 0, fmt.Errorf("hook of container %q: no port named %q", spec.Name, port.StrVal)
}
