// Package extender calls external services for scheduling decisions with the protocol of
// kube-scheduler's HTTP extenders (k8s.io/kube-scheduler/extender/v1). Responses are limited in
// size and time, and may contain only nodes and pods of the request.
package extender

import (
	"bytes"
	"context"
	"crypto/tls"
	"crypto/x509"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"
	"strings"
	"time"

	v1 "k8s.io/api/core/v1"
	file "k8s.io/kube-scheduler/config/v1"
	wire "k8s.io/kube-scheduler/extender/v1"

	"keelson.dev/keelson/controlplane/scheduler/framework"
	"keelson.dev/keelson/internal/filewatch"
)

// The default timeout of a request to an extender, and limits of sizes in bytes.
const (
	defaultTimeout = 5 * time.Second
	// A response may be at most twice as long as the request plus answerBytes.
	answerBytes = 1 << 20
	fileBytes   = 1 << 20
)

// Extender calls one external service over HTTP. It implements framework.Extender.
type Extender struct {
	conf    file.Extender
	name    string
	managed map[v1.ResourceName]bool
	client  *http.Client
}

// New returns an extender for a valid configuration. It reads the certificate files of the
// tlsConfig and opens no connection.
func New(conf file.Extender) (*Extender, error) {
	e := &Extender{conf: conf, name: "extender " + conf.URLPrefix, managed: make(map[v1.ResourceName]bool)}
	for _, r := range conf.ManagedResources {
		e.managed[v1.ResourceName(r.Name)] = true
	}
	secured, err := tlsOf(conf.TLSConfig)
	if err != nil {
		return nil, fmt.Errorf("tlsConfig.%w", err)
	}
	timeout := conf.HTTPTimeout.Duration
	if timeout == 0 {
		timeout = defaultTimeout
	}
	e.client = &http.Client{
		Timeout:       timeout,
		CheckRedirect: func(*http.Request, []*http.Request) error { return http.ErrUseLastResponse },
		Transport: &http.Transport{Proxy: http.ProxyFromEnvironment, TLSClientConfig: secured, MaxIdleConnsPerHost: 4,
			MaxConnsPerHost: 64,
			IdleConnTimeout: 90 * time.Second, MaxResponseHeaderBytes: 64 << 10, ForceAttemptHTTP2: true},
	}
	return e, nil
}

// tlsOf returns the TLS configuration for the connections to an extender. Without a configured CA,
// the CAs of the system are used.
func tlsOf(c *file.ExtenderTLSConfig) (*tls.Config, error) {
	out := &tls.Config{MinVersion: tls.VersionTLS12}
	if c == nil {
		return out, nil
	}
	out.InsecureSkipVerify, out.ServerName = c.Insecure, c.ServerName
	authority, cert, key := c.CAData, c.CertData, c.KeyData
	for _, f := range []struct {
		field, path string
		into        *[]byte
	}{{"caFile", c.CAFile, &authority}, {"certFile", c.CertFile, &cert}, {"keyFile", c.KeyFile, &key}} {
		if f.path == "" || len(*f.into) > 0 { // inline data in the configuration has priority over a file
			continue
		}
		data, err := filewatch.Read(f.path, fileBytes)
		if err != nil {
			return nil, fmt.Errorf("%s: %w", f.field, err)
		}
		*f.into = data
	}
	if len(authority) > 0 {
		out.RootCAs = x509.NewCertPool()
		if !out.RootCAs.AppendCertsFromPEM(authority) {
			return nil, errors.New("caFile: it contains no PEM certificate")
		}
	}
	if len(cert)+len(key) > 0 {
		pair, err := tls.X509KeyPair(cert, key)
		if err != nil {
			return nil, fmt.Errorf("certFile: %w", err)
		}
		out.Certificates = []tls.Certificate{pair}
	}
	return out, nil
}

// Name implements framework.Extender: it returns the extender's name in messages.
func (e *Extender) Name() string { return e.name }

// Ignorable implements framework.Extender: it reports whether the configuration lets scheduling
// continue if a call of the extender fails.
func (e *Extender) Ignorable() bool { return e.conf.Ignorable }

func (e *Extender) verbURL(v framework.Verb) string {
	return [...]string{framework.VerbFilter: e.conf.FilterVerb, framework.VerbPrioritize: e.conf.PrioritizeVerb,
		framework.VerbPreempt: e.conf.PreemptVerb, framework.VerbBind: e.conf.BindVerb}[v]
}

// Does implements framework.Extender: it reports whether the extender implements the operation v,
// which means that the configuration contains a URL for it.
func (e *Extender) Does(v framework.Verb) bool { return e.verbURL(v) != "" }

// Interested implements framework.Extender: it reports whether the pod requests one of the
// extender's managedResources. If none are configured, it returns true.
func (e *Extender) Interested(pod *framework.PodInfo) bool {
	if len(e.managed) == 0 {
		return true
	}
	for name := range pod.Requests.Scalar {
		if e.managed[name] {
			return true
		}
	}
	return false
}

// callVerb posts request as JSON to the extender's URL for the operation v, and decodes the JSON
// response into response. It returns an error if the status is not 200 or the response exceeds the
// size limit.
func (e *Extender) callVerb(ctx context.Context, v framework.Verb, request, response any) error {
	body, err := json.Marshal(request)
	if err != nil {
		return err
	}
	url := strings.TrimRight(e.conf.URLPrefix, "/") + "/" + e.verbURL(v)
	req, err := http.NewRequestWithContext(ctx, http.MethodPost, url, bytes.NewReader(body))
	if err != nil {
		return err
	}
	req.Header.Set("Content-Type", "application/json")
	resp, err := e.client.Do(req)
	if err != nil {
		return err
	}
	defer resp.Body.Close()
	most := int64(2*len(body) + answerBytes)
	data, err := io.ReadAll(io.LimitReader(resp.Body, most+1))
	switch {
	case err != nil:
		return fmt.Errorf("reading the response: %w", err)
	case int64(len(data)) > most:
		return fmt.Errorf("the response is larger than %d bytes", most)
	case resp.StatusCode != http.StatusOK:
		return fmt.Errorf("it answered %d: %s", resp.StatusCode, framework.Brief(string(data)))
	}
	if err := json.Unmarshal(data, response); err != nil {
		return fmt.Errorf("decoding the response: %w", err)
	}
	return nil
}

// extenderArgs returns the body of a Filter or Prioritize request. It contains the node objects, or
// only their names if the extender has its own node cache (nodeCacheCapable).
func (e *Extender) extenderArgs(pod *v1.Pod, nodes []*framework.NodeInfo) *wire.ExtenderArgs {
	q := &wire.ExtenderArgs{Pod: pod}
	if e.conf.NodeCacheCapable {
		names := make([]string, 0, len(nodes))
		for _, n := range nodes {
			names = append(names, n.Node.Name)
		}
		q.NodeNames = &names
		return q
	}
	q.Nodes = &v1.NodeList{Items: make([]v1.Node, 0, len(nodes))}
	for _, n := range nodes {
		q.Nodes.Items = append(q.Nodes.Items, *n.Node)
	}
	return q
}

// Filter implements framework.Extender: it requests from the service which nodes fit the pod, and
// returns the refused nodes with their reasons. A response with a node that was not in the request
// is an error.
func (e *Extender) Filter(ctx context.Context, pod *v1.Pod, nodes []*framework.NodeInfo) (
	map[string]*framework.Status, error,
) {
	var a wire.ExtenderFilterResult
	if err := e.callVerb(ctx, framework.VerbFilter, e.extenderArgs(pod, nodes), &a); err != nil {
		return nil, err
	}
	if a.Error != "" {
		return nil, errors.New(framework.Brief(a.Error))
	}
	left := make(map[string]bool)
	if e.conf.NodeCacheCapable && a.NodeNames != nil {
		for _, name := range *a.NodeNames {
			left[name] = true
		}
	} else if a.Nodes != nil {
		for i := range a.Nodes.Items {
			left[a.Nodes.Items[i].Name] = true
		}
	}
	asked := make(map[string]bool, len(nodes))
	refused := make(map[string]*framework.Status)
	kept := make(map[string]*framework.Status) // by reason: nodes that are refused for the same reason share one status
	for _, n := range nodes {
		name := n.Node.Name
		asked[name] = true
		reason, forGood := a.FailedAndUnresolvableNodes[name]
		if !forGood {
			var said bool
			if reason, said = a.FailedNodes[name]; !said && left[name] {
				continue
			}
		}
		refused[name] = e.refuseNode(kept, reason, forGood)
	}
	for name := range left {
		if !asked[name] {
			return nil, fmt.Errorf("the response contains node %q, which was not in the request", framework.Brief(name))
		}
	}
	return refused, nil
}

// refuseNode returns the status for a node that the extender refuses. cache holds the statuses of
// this request by reason: nodes with the same reason share one status. forGood means that
// preemption on the node cannot help; the code is then Unresolvable, and otherwise Unschedulable.
func (e *Extender) refuseNode(cache map[string]*framework.Status, reason string, forGood bool) *framework.Status {
	if reason = framework.Brief(reason); reason == "" {
		reason = "node(s) left out"
	}
	key := fmt.Sprint(forGood, reason)
	if cache[key] == nil {
		text := fmt.Sprintf("%s (%s)", reason, e.name)
		cache[key] = framework.Refuse(e.name, text)
		if forGood {
			cache[key] = framework.RefuseForGood(e.name, text)
		}
	}
	return cache[key]
}

// Prioritize implements framework.Extender: it requests a score from 0 to 10 for each node. It
// scales each score to the range up to framework.MaxScore and multiplies it by the extender's
// weight.
func (e *Extender) Prioritize(ctx context.Context, pod *v1.Pod, nodes []*framework.NodeInfo) ([]int64, error) {
	var list wire.HostPriorityList
	if err := e.callVerb(ctx, framework.VerbPrioritize, e.extenderArgs(pod, nodes), &list); err != nil {
		return nil, err
	}
	at := make(map[string]int, len(nodes))
	for i, n := range nodes {
		at[n.Node.Name] = i
	}
	out := make([]int64, len(nodes))
	for _, h := range list {
		i, ok := at[h.Host]
		if !ok || h.Score < wire.MinExtenderPriority || h.Score > wire.MaxExtenderPriority {
			return nil, fmt.Errorf("the response contains score %d for node %q: want 0 to 10 for nodes of the request",
				h.Score, framework.Brief(h.Host))
		}
		out[i] = h.Score * e.conf.Weight * (framework.MaxScore / wire.MaxExtenderPriority)
	}
	return out, nil
}

// Preempt implements framework.Extender: it returns the nodes on which the service accepts
// preemption, each with the pods to evict. A response with a node or pod that was not in the
// request is an error.
func (e *Extender) Preempt(ctx context.Context, pod *v1.Pod, nodes map[string]framework.Victims) (
	map[string]framework.Victims, error,
) {
	q := &wire.ExtenderPreemptionArgs{Pod: pod}
	if e.conf.NodeCacheCapable {
		q.NodeNameToMetaVictims = make(map[string]*wire.MetaVictims, len(nodes))
	} else {
		q.NodeNameToVictims = make(map[string]*wire.Victims, len(nodes))
	}
	for name, v := range nodes {
		ids, full := &wire.MetaVictims{NumPDBViolations: int64(v.Violations)},
			&wire.Victims{NumPDBViolations: int64(v.Violations)}
		for _, p := range v.Pods {
			ids.Pods, full.Pods = append(ids.Pods, &wire.MetaPod{UID: string(p.Pod.UID)}), append(full.Pods, p.Pod)
		}
		if e.conf.NodeCacheCapable {
			q.NodeNameToMetaVictims[name] = ids
		} else {
			q.NodeNameToVictims[name] = full
		}
	}
	var a wire.ExtenderPreemptionResult
	if err := e.callVerb(ctx, framework.VerbPreempt, q, &a); err != nil {
		return nil, err
	}
	out := make(map[string]framework.Victims, len(a.NodeNameToMetaVictims))
	for name, now := range a.NodeNameToMetaVictims {
		was, ok := nodes[name]
		if !ok || now == nil {
			return nil, fmt.Errorf("the response contains node %q, which was not in the request", framework.Brief(name))
		}
		v, err := chosenVictims(was, now)
		if err != nil {
			return nil, fmt.Errorf("on node %q %w", name, err)
		}
		out[name] = v
	}
	return out, nil
}

// chosenVictims returns the pods on one node that the extender's response lists for eviction. It
// returns an error if a pod is not in requested, the victims in the request, or occurs twice.
func chosenVictims(requested framework.Victims, response *wire.MetaVictims) (framework.Victims, error) {
	out := framework.Victims{Violations: int(min(max(response.NumPDBViolations, 0), int64(len(requested.Pods))))}
	seen := make(map[string]bool)
	for _, id := range response.Pods {
		found := false
		for _, pod := range requested.Pods {
			if id != nil && string(pod.Pod.UID) == id.UID && !seen[id.UID] {
				out.Pods, seen[id.UID], found = append(out.Pods, pod), true, true
			}
		}
		if !found {
			return out, errors.New("the response contains a pod that was not in the request, or a pod twice")
		}
	}
	return out, nil
}

// Bind implements framework.Extender: it requests that the service binds the pod to the node.
func (e *Extender) Bind(ctx context.Context, pod *v1.Pod, node string) error {
	var a wire.ExtenderBindingResult
	if err := e.callVerb(ctx, framework.VerbBind,
		&wire.ExtenderBindingArgs{PodName: pod.Name, PodNamespace: pod.Namespace, PodUID: pod.UID, Node: node},
		&a); err != nil {
		return err
	}
	if a.Error != "" {
		return errors.New(framework.Brief(a.Error))
	}
	return nil
}
