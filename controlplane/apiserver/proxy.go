package apiserver

import (
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"net"
	"net/http"
	"net/url"
	"slices"
	"strconv"
	"strings"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/runtime"

	"keelson.dev/keelson/controlplane/api"
	"keelson.dev/keelson/controlplane/apiserver/dialer"
	"keelson.dev/keelson/controlplane/apiserver/endpoints"
	"keelson.dev/keelson/controlplane/apiserver/flowcontrol"
	"keelson.dev/keelson/controlplane/apiserver/forward"
	"keelson.dev/keelson/controlplane/apiserver/subresource"
)

// proxySubresource is the subresource that proxies requests to a Service, pod or node.
const proxySubresource = "proxy"

// isProxy reports whether a target is the proxy subresource of a Service, pod or node, or a path
// below it.
func isProxy(t endpoints.Target) bool {
	return t.GVR.Group == "" && t.GVR.Version == "v1" && t.Name != "" && !t.Watch &&
		(t.Subresource == proxySubresource || strings.HasPrefix(t.Subresource, proxySubresource+"/")) &&
		slices.Contains([]string{"services", "pods", "nodes"}, t.GVR.Resource)
}

// proxyTarget is the destination of a proxied request.
type proxyTarget struct {
	scheme, host string // host is the host name that is sent to the destination
	dial         func(ctx context.Context, network, address string) (net.Conn, error)
	tls          *tls.Config // nil = the certificate of the destination is not verified
}

// proxyHandler serves the proxy subresource of Services, pods and nodes.
type proxyHandler struct {
	pipeline  *pipeline
	resources *endpoints.Handler
	gate      *gate
	dialer    *dialer.Dialer
	nodeTLS   func(node string) *tls.Config // Config.Outbound.NodeTLS
}

// serveProxy serves a request for a proxy subresource. It returns false if r is another request.
func (p *proxyHandler) serveProxy(w http.ResponseWriter, r *http.Request, u api.User) bool {
	t, ok := endpoints.ParsePath(r.URL.Path)
	if !ok || !isProxy(t) {
		return false
	}
	if err := p.proxyRequest(w, r, u, t); err != nil {
		p.resources.WriteError(w, r, err)
	}
	return true
}

// proxyRequest authorizes a request and proxies it to a Service, pod or node. If it returns an
// error, it has not written a response.
func (p *proxyHandler) proxyRequest(w http.ResponseWriter, r *http.Request, u api.User, t endpoints.Target) error {
	if err := p.pipeline.authorizeAttributes(r.Context(), remoteAttributes(r, u), nil); err != nil {
		return err
	}
	prefix, rest, slash := splitProxy(r.URL.EscapedPath(), t)
	to, err := p.resolveTarget(r.Context(), u, t, rest)
	if err != nil {
		return err
	}
	if !slash && (r.Method == http.MethodGet || r.Method == http.MethodHead) && !forward.Upgrades(r) {
		// Relative links of the page need a path that ends with a slash.
		w.Header().Set("Location", (&url.URL{Path: r.URL.Path + "/", RawQuery: r.URL.RawQuery}).String())
		w.WriteHeader(http.StatusMovedPermanently)
		return nil
	}
	pass, err := p.gate.Enter(r.Context(), flowcontrol.Watch, callerOf(u), proxiedRequestBytes)
	if err != nil {
		return tooManyRequests(err, flowcontrol.Watch, callerOf(u))
	}
	defer pass.Leave()
	target, err := url.Parse(to.scheme + "://" + to.host + "/" + strings.TrimPrefix(rest, "/"))
	if err != nil {
		return apierrors.NewBadRequest(err.Error())
	}
	target.RawQuery = r.URL.RawQuery
	if to.tls == nil { // as in Kubernetes
		to.tls = &tls.Config{InsecureSkipVerify: true, MinVersion: tls.VersionTLS12}
	}
	transport := forward.Transport(to.dial, &http.Transport{TLSClientConfig: to.tls, DisableKeepAlives: true})
	defer transport.CloseIdleConnections()
	forward.Forward{
		Target: target, Transport: transport,
		Head:   func(h http.Header) { h.Set("X-Forwarded-Uri", r.URL.EscapedPath()) },
		Answer: forward.Links{Prefix: prefix, Hosts: []string{target.Host, r.Host}}.Apply,
		Failed: func(w http.ResponseWriter, r *http.Request, err error) {
			p.resources.WriteError(w, r, proxyError(err))
		},
	}.ServeHTTP(w, r)
	return nil
}

func proxyError(err error) error {
	var status apierrors.APIStatus
	switch {
	case errors.As(err, &status):
		return err
	case errors.Is(err, forward.ErrNoUpgrade):
		return apierrors.NewBadRequest(err.Error())
	}
	return apierrors.NewServiceUnavailable("error trying to reach service: " + err.Error())
}

// splitProxy splits an escaped path after the proxy subresource. slash reports whether a slash
// follows the subresource.
func splitProxy(path string, t endpoints.Target) (prefix, rest string, slash bool) {
	n := 5 // the parts of /api/v1/nodes/NAME/proxy
	if t.Namespace != "" {
		n = 7
	}
	at := 0
	for range n {
		next := strings.IndexByte(path[at+1:], '/')
		if next < 0 {
			return path, "", false
		}
		at += 1 + next
	}
	return path[:at], path[at:], true
}

// splitName parses the name of a proxied object: "name", "name:port" or "scheme:name:port".
func splitName(id string) (scheme, name, port string, ok bool) {
	parts := strings.Split(id, ":")
	switch len(parts) {
	case 1:
		return "http", parts[0], "", parts[0] != ""
	case 2:
		return "http", parts[0], parts[1], parts[0] != ""
	case 3:
		if parts[0] == "" {
			parts[0] = "http"
		}
		return parts[0], parts[1], parts[2], (parts[0] == "http" || parts[0] == "https") && parts[1] != ""
	}
	return "", "", "", false
}

// resolveTarget returns the destination of a proxied request. It reads the object, runs admission
// and resolves the address and port.
func (p *proxyHandler) resolveTarget(ctx context.Context, u api.User, t endpoints.Target, path string) (
	proxyTarget, error,
) {
	kind := p.pipeline.kinds.ByResource(t.GVR)
	scheme, name, port, ok := splitName(t.Name)
	if kind == nil || kind.Namespaced != (t.Namespace != "") {
		return proxyTarget{}, apierrors.NewNotFound(t.GVR.GroupResource(), t.Name)
	}
	if !ok {
		return proxyTarget{}, apierrors.NewBadRequest(fmt.Sprintf("invalid %s request %q",
			kind.Naming.Singular, t.Name))
	}
	r := &api.Request{User: u, Verb: api.VerbConnect, Kind: kind, Subresource: proxySubresource,
		Namespace: t.Namespace, Name: name}
	obj, err := p.pipeline.registry.GetObject(ctx,
		&api.Request{User: u, Verb: api.VerbGet, Kind: kind, Namespace: t.Namespace, Name: name})
	if err != nil {
		return proxyTarget{}, err
	}
	var options runtime.Object
	switch t.GVR.Resource {
	case "services":
		options = &corev1.ServiceProxyOptions{Path: path}
	case "pods":
		options = &corev1.PodProxyOptions{Path: path}
	default:
		options = &corev1.NodeProxyOptions{Path: path}
	}
	if _, err := subresource.Admit(ctx, r, p.pipeline, options, obj); err != nil {
		return proxyTarget{}, err
	}
	h := proxyTarget{scheme: scheme}
	switch o := obj.(type) {
	case *corev1.Service:
		return p.resolveService(h, o, port)
	case *corev1.Pod:
		return p.resolvePod(h, o, port)
	case *corev1.Node:
		return p.resolveNode(h, o, port)
	}
	return proxyTarget{}, apierrors.NewMethodNotSupported(kind.GroupResource(), proxySubresource)
}

func (p *proxyHandler) resolveService(h proxyTarget, svc *corev1.Service, port string) (proxyTarget, error) {
	number := int32(0)
	for _, declared := range svc.Spec.Ports {
		if declared.Name == port || strconv.Itoa(int(declared.Port)) == port || port == "" && len(svc.Spec.Ports) == 1 {
			number = declared.Port
			break
		}
	}
	if number == 0 {
		if n, err := strconv.ParseUint(port, 10, 16); err == nil {
			return proxyTarget{},
				apierrors.NewServiceUnavailable(fmt.Sprintf("no service port %d found for service %q", n, svc.Name))
		}
		return proxyTarget{},
			apierrors.NewServiceUnavailable(fmt.Sprintf("no endpoints available for service %q", svc.Name))
	}
	h.host = fmt.Sprintf("%s.%s.svc:%d", svc.Name, svc.Namespace, number)
	h.dial = p.dialer.ForPods(svc.Namespace, svc.Name, number)
	return h, nil
}

// resolvePod returns the destination for a pod. If no port is given, it uses the first port that a
// container declares, or else the default port of the scheme.
func (p *proxyHandler) resolvePod(h proxyTarget, pod *corev1.Pod, port string) (proxyTarget, error) {
	number, err := portNumber(port, h.scheme)
	if err != nil {
		return proxyTarget{}, err
	}
	if port == "" {
		for i := range pod.Spec.Containers {
			if ports := pod.Spec.Containers[i].Ports; len(ports) > 0 {
				number = ports[0].ContainerPort
				break
			}
		}
	}
	h.host = net.JoinHostPort(pod.Status.PodIP, strconv.Itoa(int(number)))
	h.dial = func(ctx context.Context, _, _ string) (net.Conn, error) {
		conn, _, err := p.dialer.DialPod(ctx, pod, number)
		return conn, err
	}
	if pod.Status.PodIP == "" || pod.Spec.NodeName == "" {
		return proxyTarget{},
			apierrors.NewServiceUnavailable(fmt.Sprintf("address not allowed: pod %q has no address yet", pod.Name))
	}
	return h, nil
}

// resolveNode returns the destination for a node. The default port is that of the node's kubelet
// API. At this port, the API server authenticates with its client certificate, and the node trusts
// its authorization decision. If the node has no kubelet API, the request must contain a port.
func (p *proxyHandler) resolveNode(h proxyTarget, node *corev1.Node, port string) (proxyTarget, error) {
	own := node.Status.DaemonEndpoints.KubeletEndpoint.Port
	number := own
	if port != "" {
		var err error
		if number, err = portNumber(port, h.scheme); err != nil {
			return proxyTarget{}, err
		}
	}
	if number == 0 {
		return proxyTarget{},
			apierrors.NewServiceUnavailable(fmt.Sprintf("node %q serves no kubelet API: specify a port (%s:PORT)",
				node.Name, node.Name))
	}
	if number == own && p.nodeTLS != nil {
		h.scheme, h.tls = "https", p.nodeTLS(node.Name)
	}
	h.host = net.JoinHostPort(node.Name, strconv.Itoa(int(number)))
	h.dial = func(ctx context.Context, _, _ string) (net.Conn, error) {
		conn, _, err := p.dialer.DialNode(ctx, node, number)
		return conn, err
	}
	return h, nil
}

func portNumber(port, scheme string) (int32, error) {
	if port == "" {
		if scheme == "https" {
			return 443, nil
		}
		return 80, nil
	}
	n, err := strconv.ParseUint(port, 10, 16)
	if err != nil || n == 0 {
		return 0, apierrors.NewBadRequest(fmt.Sprintf("invalid port %q", port))
	}
	return int32(n), nil
}
