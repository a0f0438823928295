package kctl

import (
	"archive/tar"
	"bytes"
	"compress/gzip"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"path"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/spf13/cobra"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/cli-runtime/pkg/genericiooptions"
	"k8s.io/client-go/rest"
	cmdutil "k8s.io/kubectl/pkg/cmd/util"

	"keelson.dev/keelson/controlplane/api"
	"keelson.dev/keelson/kctl/redact"
	"keelson.dev/keelson/kctl/verb"
)

// Limits of the files in a support bundle, and of the requests that collect them.
const (
	maxSupportFileBytes   = 4 << 20  // maximum size of a file in bytes; only the end of a larger file is kept
	maxSupportBytes       = 96 << 20 // maximum size of all files together in bytes
	supportRequestTimeout = 15 * time.Second
	supportConcurrency    = 6
	maxSupportObjects     = 500 // maximum number of objects of a resource
)

// supportKinds are the API paths of the resources in a support bundle. Secrets and ConfigMaps are
// not among them.
var supportKinds = []string{
	"/api/v1/events", "/api/v1/namespaces", "/api/v1/pods", "/api/v1/services", "/api/v1/persistentvolumes",
	"/api/v1/persistentvolumeclaims",
	"/api/v1/replicationcontrollers", "/api/v1/resourcequotas", "/apis/apps/v1/deployments",
	"/apis/apps/v1/replicasets", "/apis/apps/v1/statefulsets",
	"/apis/apps/v1/daemonsets", "/apis/batch/v1/jobs", "/apis/batch/v1/cronjobs",
	"/apis/storage.k8s.io/v1/storageclasses",
	"/apis/storage.k8s.io/v1/volumeattachments", "/apis/discovery.k8s.io/v1/endpointslices",
	"/apis/networking.k8s.io/v1/networkpolicies",
	"/apis/networking.k8s.io/v1/ingresses", "/apis/policy/v1/poddisruptionbudgets",
	"/apis/apiregistration.k8s.io/v1/apiservices",
	"/apis/admissionregistration.k8s.io/v1/validatingwebhookconfigurations",
	"/apis/admissionregistration.k8s.io/v1/mutatingwebhookconfigurations",
}

func supportCommand(f cmdutil.Factory, streams genericiooptions.IOStreams) *cobra.Command {
	c := &cobra.Command{
		Use:   "support-bundle [FILE]",
		Short: "Collect diagnostic data of the cluster in one file, without secrets",
		Long: "Collect diagnostic data of the cluster in one file. The default name of FILE contains the time.\n" +
			"\n" +
			"The file contains versions, the status, alarms, the expiry of certificates, settings, metrics, and\n" +
			"the last log lines of all replicas and agents. It also contains Nodes, Events and workloads.\n" +
			"Secrets and ConfigMaps are not read. Values of environment variables, commands, arguments,\n" +
			"annotations and parameters are removed. Texts that look like a key, a token or a password are\n" +
			"removed too. CONTENTS.txt in the file lists what it contains, and what is missing and why.\n" +
			"\n" +
			"Review the file before you share it: it contains names, addresses and images.",
		Example: "  kctl cluster support-bundle\n  kctl cluster support-bundle /tmp/bundle.tar.gz --nodes w1,w2",
		Args:    cobra.MaximumNArgs(1),
	}
	nodes := c.Flags().StringSlice("nodes", nil,
		"names of the nodes whose agents are asked (default: at most 50 nodes, nodes that are not Ready first)")
	limit := c.Flags().Duration("timeout", 2*time.Minute,
		"time limit of the command; data that is not received in time is missing from the file")
	c.RunE = func(_ *cobra.Command, args []string) error {
		ctx, cancel := verb.WithSignals()
		defer cancel()
		name := "keelson-support-" + time.Now().UTC().Format("20060102T150405Z") + ".tar.gz"
		if len(args) > 0 {
			name = args[0]
		}
		if *limit <= 0 {
			return fmt.Errorf("--timeout %s: want more than 0", *limit)
		}
		rc, err := newRESTClient(f.ToRESTConfig())
		if err != nil {
			return err
		}
		within, stop := context.WithTimeout(ctx, *limit)
		defer stop()
		b := &supportBundle{rest: rc, files: map[string][]byte{}, missing: map[string]string{}, left: maxSupportBytes}
		b.collectAll(within, *nodes)
		if ctx.Err() != nil {
			return context.Cause(ctx)
		}
		if len(b.files) == 0 {
			return fmt.Errorf("no data could be collected: %s", b.missing["status.json"])
		}
		if err := b.writeArchive(name); err != nil {
			return err
		}
		fmt.Fprintf(streams.Out, "%s: %d files, %d are missing (CONTENTS.txt in it says which)\n", name, len(b.files),
			len(b.missing))
		return nil
	}
	verb.CompleteFlag(c, "nodes", nodeNames(f))
	return c
}

// supportBundle collects the redacted files of a support bundle, and the reasons for missing files.
// addFile, addMissing and the methods that request data can be called concurrently.
type supportBundle struct {
	rest rest.Interface

	mu      sync.Mutex
	files   map[string][]byte
	missing map[string]string // reason by file name
	left    int
}

// addFile adds a file to the bundle, or only its end if it is too large. content must already be
// redacted. If the bundle is full, the file is recorded as missing.
func (b *supportBundle) addFile(name string, content []byte) {
	b.mu.Lock()
	defer b.mu.Unlock()
	if cut := len(content) - maxSupportFileBytes; cut > 0 {
		content = append([]byte(fmt.Sprintf("(the first %d bytes are left out)\n", cut)), content[cut:]...)
	}
	if len(content) > b.left {
		b.missing[name] = fmt.Sprintf("the bundle has %d bytes already, and this has %d",
			maxSupportBytes-b.left, len(content))
		return
	}
	b.left -= len(content)
	b.files[name] = content
}

func (b *supportBundle) addMissing(name string, err error) {
	b.mu.Lock()
	defer b.mu.Unlock()
	b.missing[name] = redact.Text(err.Error())
}

// request sends a request to a path of the API and returns the response body. It fails if the body
// is too large. body is JSON, or nil.
func (b *supportBundle) request(ctx context.Context, method, urlPath string, body []byte) ([]byte, error) {
	ctx, cancel := context.WithTimeout(ctx, supportRequestTimeout)
	defer cancel()
	r := b.rest.Verb(method).RequestURI(urlPath).SetHeader("Accept", "application/json, */*")
	if body != nil {
		r = r.Body(body).SetHeader("Content-Type", "application/json")
	}
	in, err := r.Stream(ctx)
	if err != nil {
		return nil, err
	}
	defer in.Close()
	raw, err := io.ReadAll(io.LimitReader(in, 4*maxSupportFileBytes))
	if err == nil && len(raw) == 4*maxSupportFileBytes {
		err = fmt.Errorf("the response of %s is larger than %d bytes", urlPath, 4*maxSupportFileBytes)
	}
	return raw, err
}

// addJSON reads the JSON response of an API path, and adds its redacted form to the bundle as the
// file with the given name. It returns the response before redaction. If the request fails, it
// records the file as missing and returns nil.
func (b *supportBundle) addJSON(ctx context.Context, name, urlPath string) []byte {
	raw, err := b.request(ctx, "GET", urlPath, nil)
	var clean []byte
	if err == nil {
		clean, err = redact.JSON(raw)
	}
	if err != nil {
		b.addMissing(name, err)
		return nil
	}
	b.addFile(name, clean)
	return raw
}

// addText reads the text response of an API path, and adds its redacted form to the bundle as the
// file with the given name. If the request fails, it records the file as missing.
func (b *supportBundle) addText(ctx context.Context, name, urlPath string) {
	raw, err := b.request(ctx, "GET", urlPath, nil)
	if err != nil {
		b.addMissing(name, err)
		return
	}
	b.addFile(name, []byte(redact.Text(string(raw))))
}

// addAgentSettings reads the settings of the agent of a node at an API path, and adds them to the
// bundle as the file settings.txt of that node. If the request fails, it records the file as
// missing. Agents of earlier releases respond with status 404.
func (b *supportBundle) addAgentSettings(ctx context.Context, node, urlPath string) {
	name := "nodes/" + node + "/settings.txt"
	raw, err := b.request(ctx, "GET", urlPath, nil)
	if apierrors.IsNotFound(err) {
		err = fmt.Errorf("reading the settings of the agent on node %s: the agent is of an earlier release, which "+
			"does not report its settings, or the node does not exist: %w", node, err)
	}
	if err != nil {
		b.addMissing(name, err)
		return
	}
	b.addFile(name, []byte(redact.Text(string(raw))))
}

// collectAll collects all files of the bundle, with at most supportConcurrency requests at a time.
// nodes are the node names in the flag --nodes. Data that is not received before ctx is done is
// recorded as missing.
func (b *supportBundle) collectAll(ctx context.Context, nodes []string) {
	b.addFile("kctl.txt", []byte(fmt.Sprintf("kctl %s\nmade %s\n", Version, time.Now().UTC().Format(time.RFC3339))))
	var jobs []func()
	raw := b.addJSON(ctx, "status.json", api.PathClusterStatus)
	var s api.ClusterStatus
	if raw != nil && json.Unmarshal(raw, &s) == nil {
		var text bytes.Buffer
		if printStatus(&text, s) == nil {
			b.addFile("status.txt", []byte(redact.Text(text.String())))
		}
	}
	for _, m := range s.Members {
		jobs = append(jobs, func() { b.addReplica(ctx, m.Name) })
	}
	for name, urlPath := range map[string]string{"version.json": "/version",
		"certificates.json": api.PathClusterCertificates, "keys.json": api.PathClusterKeys} {
		jobs = append(jobs, func() { b.addJSON(ctx, name, urlPath) })
	}
	for _, p := range supportKinds {
		jobs = append(jobs, func() {
			b.addJSON(ctx, "objects/"+path.Base(p)+".json", fmt.Sprintf("%s?limit=%d", p, maxSupportObjects))
		})
	}
	for _, name := range b.addNodes(ctx, nodes) {
		jobs = append(jobs, func() {
			at := "/api/v1/nodes/" + name + "/proxy"
			b.addText(ctx, "nodes/"+name+"/agent.log", at+api.AgentLogPath)
			b.addText(ctx, "nodes/"+name+"/metrics.txt", at+"/metrics")
			b.addAgentSettings(ctx, name, at+api.AgentSettingsPath)
		})
	}
	turns := make(chan struct{}, supportConcurrency)
	var all sync.WaitGroup
	for _, job := range jobs {
		turns <- struct{}{}
		all.Go(func() { defer func() { <-turns }(); job() })
	}
	all.Wait()
}

// addReplica adds the log, the metrics and the settings of the replica with that name.
func (b *supportBundle) addReplica(ctx context.Context, name string) {
	at := "replicas/" + name + "/"
	q, err := json.Marshal(api.ClusterSupport{Replica: name})
	var raw []byte
	if err == nil {
		raw, err = b.request(ctx, "POST", api.PathClusterSupport, q)
	}
	var part api.ClusterSupportPart
	if err == nil {
		err = json.Unmarshal(raw, &part)
	}
	if err != nil {
		b.addMissing(at, err)
		return
	}
	if part.Problem != "" {
		b.addMissing(at+"metrics.txt", errors.New(part.Problem))
	}
	b.addFile(at+"daemon.log", []byte(redact.Text(part.Log)))
	b.addFile(at+"metrics.txt", []byte(redact.Text(part.Metrics)))
	var about strings.Builder
	fmt.Fprintf(&about, "version: %s\ngo: %s\ngoroutines: %d\n\n", part.Version, part.Go, part.Goroutines)
	names := make([]string, 0, len(part.Flags))
	for flag := range part.Flags {
		names = append(names, flag)
	}
	slices.Sort(names)
	for _, flag := range names {
		fmt.Fprintf(&about, "%s: %s\n", flag, part.Flags[flag])
	}
	b.addFile(at+"settings.txt", []byte(redact.Text(about.String())))
}

// maxDefaultNodes is the maximum number of node agents from which data is collected if --nodes is
// not given.
const maxDefaultNodes = 50

// addNodes adds the Node objects to the bundle, and returns the names of the nodes from which agent
// data is collected. These are the requested nodes. If requested is empty, they are the first
// maxDefaultNodes nodes; nodes that are not Ready come first.
func (b *supportBundle) addNodes(ctx context.Context, requested []string) []string {
	raw := b.addJSON(ctx, "objects/nodes.json", fmt.Sprintf("/api/v1/nodes?limit=%d", maxSupportObjects))
	if len(requested) > 0 || raw == nil {
		return requested
	}
	var list struct {
		Items []struct {
			Metadata struct{ Name string }
			Status   struct {
				Conditions []struct{ Type, Status string }
			}
		}
	}
	if err := json.Unmarshal(raw, &list); err != nil {
		b.addMissing("nodes/", err)
		return nil
	}
	var bad, good []string
	for _, n := range list.Items {
		ready := false
		for _, c := range n.Status.Conditions {
			ready = ready || c.Type == "Ready" && c.Status == "True"
		}
		if ready {
			good = append(good, n.Metadata.Name)
		} else {
			bad = append(bad, n.Metadata.Name)
		}
	}
	all := append(bad, good...)
	if more := len(all) - maxDefaultNodes; more > 0 {
		b.addMissing("nodes/", fmt.Errorf("%d agents were not asked: select nodes with --nodes", more))
		all = all[:maxDefaultNodes]
	}
	return all
}

// contentsText returns the text of the file CONTENTS.txt in the bundle: the names of the files, and
// the missing files with reasons.
func (b *supportBundle) contentsText() []byte {
	var out strings.Builder
	fmt.Fprintf(&out, "Taken out everywhere, and written as %q: contents of Secrets and ConfigMaps, values of "+
		"environment variables,\n"+
		"commands and arguments, annotations of others than the cluster, parameters, headers, and what looks like "+
		"a key, a token\n"+
		"or a password. Of each kind of object there are %d at most, of each file %d bytes.\n\nIn it:\n", redact.Mask,
		maxSupportObjects, maxSupportFileBytes)
	for _, name := range sortedKeys(b.files) {
		fmt.Fprintf(&out, "  %s\t%d bytes\n", name, len(b.files[name]))
	}
	if len(b.missing) > 0 {
		fmt.Fprint(&out, "\nMissing:\n")
	}
	for _, name := range sortedKeys(b.missing) {
		fmt.Fprintf(&out, "  %s\t%s\n", name, b.missing[name])
	}
	return []byte(out.String())
}

func sortedKeys[V any](m map[string]V) []string {
	out := make([]string, 0, len(m))
	for k := range m {
		out = append(out, k)
	}
	slices.Sort(out)
	return out
}

// writeArchive writes the bundle as a compressed tar archive to a new file. It fails if the file
// exists. An incomplete archive is removed.
func (b *supportBundle) writeArchive(name string) (err error) {
	f, err := os.OpenFile(name, os.O_CREATE|os.O_EXCL|os.O_WRONLY, 0o600)
	if err != nil {
		return err
	}
	defer func() {
		if err = errors.Join(err, f.Close()); err != nil {
			err = errors.Join(err, os.Remove(name))
		}
	}()
	z := gzip.NewWriter(f)
	t := tar.NewWriter(z)
	root := strings.TrimSuffix(path.Base(name), ".tar.gz") + "/"
	b.files["CONTENTS.txt"] = b.contentsText()
	for _, file := range sortedKeys(b.files) {
		head := &tar.Header{Name: root + file, Mode: 0o600, Size: int64(len(b.files[file])), ModTime: time.Now(),
			Typeflag: tar.TypeReg}
		if err := t.WriteHeader(head); err != nil {
			return err
		}
		if _, err := t.Write(b.files[file]); err != nil {
			return err
		}
	}
	return errors.Join(t.Close(), z.Close())
}
