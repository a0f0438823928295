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

// Default timeout of a request, and limits of sizes in bytes.
const (
	defaultTimeout = 5 * time.Second
	// answerBytes is how much longer than twice the request a response may be.
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
		Transport: &http.Transport{Proxy: http.ProxyFromEnvironment, TLSClientConfig: secured, MaxIdleConnsPerHost: 4, MaxConnsPerHost: 64,
			IdleConnTimeout: 90 * time.Second, MaxResponseHeaderBytes: 64 << 10, ForceAttemptHTTP2: true},
	}
	return e, nil
}

// tlsOf returns the TLS configuration of an extender's client. Without a configured CA, the CAs of
// the system are used.
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
		if f.path == "" || len(*f.into) > 0 { // data has priority over files
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

// Name implements framework.Extender.
func (e *Extender) Name() string { return e.name }

// Ignorable implements framework.Extender.
func (e *Extender) Ignorable() bool { return e.conf.Ignorable }

func (e *Extender) verbURL(v framework.Verb) string {
	return [...]string{framework.VerbFilter: e.conf.FilterVerb, framework.VerbPrioritize: e.conf.PrioritizeVerb,
		framework.VerbPreempt: e.conf.PreemptVerb, framework.VerbBind: e.conf.BindVerb}[v]
}

// Does implements framework.Extender: it reports whether a URL is configured for the verb.
func (e *Extender) Does(v framework.Verb) bool { return e.verbURL(v) != "" }

// Interested implements framework.Extender. If managedResources are configured, the pod must
// request one of them.
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

// callVerb sends question as JSON to the URL of the verb and decodes the JSON response into answer.
// A response with another status than 200 or beyond the size limit is an error.
func (e *Extender) callVerb(ctx context.Context, v framework.Verb, question, answer any) error {
	body, err := json.Marshal(question)
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
	if err := json.Unmarshal(data, answer); err != nil {
		return fmt.Errorf("decoding the response: %w", err)
	}
	return nil
}

// extenderArgs returns the request for Filter and Prioritize. It contains the node objects, or only
// their names if the extender has its own node cache (nodeCacheCapable).
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

// Filter implements framework.Extender. A response with a node that was not in the request is an
// error.
func (e *Extender) Filter(ctx context.Context, pod *v1.Pod, nodes []*framework.NodeInfo) (map[string]*framework.Status, error) {
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
	kept := make(map[string]*framework.Status) // one status per reason
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

// refuseNode returns the status for a node that the extender refuses for a reason. kept caches one
// status per reason. If forGood is set, preemption on the node cannot help.
func (e *Extender) refuseNode(kept map[string]*framework.Status, reason string, forGood bool) *framework.Status {
	if reason = framework.Brief(reason); reason == "" {
		reason = "node(s) left out"
	}
	key := fmt.Sprint(forGood, reason)
	if kept[key] == nil {
		text := fmt.Sprintf("%s (%s)", reason, e.name)
		kept[key] = framework.Refuse(e.name, text)
		if forGood {
			kept[key] = framework.RefuseForGood(e.name, text)
		}
	}
	return kept[key]
}

// Prioritize implements framework.Extender. Scores from 0 to 10 are scaled to framework.MaxScore
// and multiplied by the extender's weight.
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
			return nil, fmt.Errorf("the response contains score %d for node %q: want 0 to 10 for nodes of the request", h.Score, framework.Brief(h.Host))
		}
		out[i] = h.Score * e.conf.Weight * (framework.MaxScore / wire.MaxExtenderPriority)
	}
	return out, nil
}

// Preempt implements framework.Extender. A response with a node or pod that was not in the request
// is an error.
func (e *Extender) Preempt(ctx context.Context, pod *v1.Pod, nodes map[string]framework.Victims) (map[string]framework.Victims, error) {
	q := &wire.ExtenderPreemptionArgs{Pod: pod}
	if e.conf.NodeCacheCapable {
		q.NodeNameToMetaVictims = make(map[string]*wire.MetaVictims, len(nodes))
	} else {
		q.NodeNameToVictims = make(map[string]*wire.Victims, len(nodes))
	}
	for name, v := range nodes {
		ids, full := &wire.MetaVictims{NumPDBViolations: int64(v.Violations)}, &wire.Victims{NumPDBViolations: int64(v.Violations)}
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

// chosenVictims returns the victims on one node that the response now contains. Each of them must
// be in was, the victims of the request.
func chosenVictims(was framework.Victims, now *wire.MetaVictims) (framework.Victims, error) {
	out := framework.Victims{Violations: int(min(max(now.NumPDBViolations, 0), int64(len(was.Pods))))}
	seen := make(map[string]bool)
	for _, id := range now.Pods {
		found := false
		for _, pod := range was.Pods {
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

// Bind implements framework.Extender.
func (e *Extender) Bind(ctx context.Context, pod *v1.Pod, node string) error {
	var a wire.ExtenderBindingResult
	if err := e.callVerb(ctx, framework.VerbBind, &wire.ExtenderBindingArgs{PodName: pod.Name, PodNamespace: pod.Namespace, PodUID: pod.UID, Node: node}, &a); err != nil {
		return err
	}
	if a.Error != "" {
		return errors.New(framework.Brief(a.Error))
	}
	return nil
}
