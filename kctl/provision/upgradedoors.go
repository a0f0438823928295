package provision

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"strings"
	"time"

	v1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/kubernetes"
	"k8s.io/kubectl/pkg/drain"

	"keelson.dev/keelson/controlplane/api"
	"keelson.dev/keelson/deploy/machines/execute"
)

// apiClusterClient is a clusterClient that sends requests from this machine directly to the
// cluster's API.
type apiClusterClient struct {
	cs  kubernetes.Interface
	out io.Writer
}

func (d *apiClusterClient) readCluster(ctx context.Context) (status api.ClusterStatus, _ []v1.Node, err error) {
	raw, err := d.cs.CoreV1().RESTClient().Get().AbsPath(api.PathClusterStatus).DoRaw(ctx)
	if err != nil {
		return status, nil, fmt.Errorf("reading the cluster's status: %w", err)
	}
	if err := json.Unmarshal(raw, &status); err != nil {
		return status, nil, fmt.Errorf("parsing the cluster's status: %w", err)
	}
	nodes, err := d.cs.CoreV1().Nodes().List(ctx, metav1.ListOptions{})
	if err != nil {
		return status, nil, fmt.Errorf("listing nodes: %w", err)
	}
	return status, nodes.Items, nil
}

func (d *apiClusterClient) transferLeader(ctx context.Context, to string) error {
	body, err := json.Marshal(api.ClusterStepDown{To: to})
	if err != nil {
		return err
	}
	return d.cs.CoreV1().RESTClient().Post().AbsPath(api.PathClusterStepDown).SetHeader("Content-Type",
		"application/json").Body(body).Do(ctx).Error()
}

func (d *apiClusterClient) mergePatchNode(ctx context.Context, node string, merge []byte) error {
	_, err := d.cs.CoreV1().Nodes().Patch(ctx, node, types.MergePatchType, merge,
		metav1.PatchOptions{FieldManager: "kctl-upgrade"})
	return err
}

func (d *apiClusterClient) drainNode(ctx context.Context, node string) error {
	h := &drain.Helper{Ctx: ctx, Client: d.cs, GracePeriodSeconds: -1, IgnoreAllDaemonSets: true,
		Out: d.out, ErrOut: d.out}
	pods, errs := h.GetPodsForDeletion(node)
	if err := errors.Join(errs...); err != nil {
		return err
	}
	return h.DeleteOrEvictPods(pods.Pods())
}

// siteClusterClient is a clusterClient that runs kctl on a control-plane machine, by ssh.
type siteClusterClient struct{ site *execute.Site }

const siteCommandTimeout = 2 * time.Minute // the time limit of a kctl command, long enough for a slow machine

// upgradeNodes is the output format of 'kctl get nodes' that prints one line for each Node, with
// only the fields that an upgrade needs. Complete Nodes would be too large for a thousand nodes.
const upgradeNodes = `jsonpath={range ` +
	`.items[*]}{.metadata.name}{"\t"}{.status.nodeInfo.containerRuntimeVersion}{"\t"}{.metadata.annotations.keelson\.dev/upgrade-drain}{"\t"}` +
	`{.spec.unschedulable}{"\t"}{.status.conditions[?(@.type=="Ready")]}{"\t"}{.status.conditions[?(@.type=="NetworkUnavailable")]}{"\t"}` +
	`{.status.conditions[?(@.type=="keelson.dev/Degraded")]}{"\n"}{end}`

func (d siteClusterClient) readCluster(ctx context.Context) (status api.ClusterStatus, nodes []v1.Node, err error) {
	raw, err := d.site.Kctl(ctx, siteCommandTimeout, "cluster", "status", "-o", "json", "--request-timeout=30s")
	if err != nil {
		return status, nil, err
	}
	if err := json.Unmarshal([]byte(raw), &status); err != nil {
		return status, nil, fmt.Errorf("parsing the output of 'kctl cluster status': %w", err)
	}
	if raw, err = d.site.Kctl(ctx, siteCommandTimeout, "get", "nodes", "-o", upgradeNodes,
		"--request-timeout=30s"); err != nil {
		return status, nil, err
	}
	nodes, err = parseUpgradeNodes(raw)
	return status, nodes, err
}

func parseUpgradeNodes(raw string) (nodes []v1.Node, err error) {
	for line := range strings.SplitSeq(raw, "\n") {
		cells := strings.Split(line, "\t")
		if line == "" {
			continue
		}
		if len(cells) != 7 {
			return nil, fmt.Errorf("parsing the output of 'kctl get nodes': a line has %d fields, want 7: %.100s",
				len(cells), line)
		}
		n := v1.Node{ObjectMeta: metav1.ObjectMeta{Name: cells[0], Annotations: map[string]string{drainMark: cells[2]}}}
		n.Status.NodeInfo.ContainerRuntimeVersion, n.Spec.Unschedulable = cells[1], cells[3] == "true"
		for _, cell := range cells[4:] {
			if cell == "" {
				continue
			}
			var c v1.NodeCondition
			if err := json.Unmarshal([]byte(cell), &c); err != nil {
				return nil, fmt.Errorf("parsing the output of 'kctl get nodes' for node %s: %w", n.Name, err)
			}
			n.Status.Conditions = append(n.Status.Conditions, c)
		}
		nodes = append(nodes, n)
	}
	return nodes, nil
}

func (d siteClusterClient) transferLeader(ctx context.Context, to string) error {
	// kctl on the machine may be of an earlier release, in which transfer-leader is called
	// step-down.
	_, err := d.site.Kctl(ctx, siteCommandTimeout, "cluster", "step-down", "--to", to)
	return err
}

func (d siteClusterClient) mergePatchNode(ctx context.Context, node string, merge []byte) error {
	_, err := d.site.Kctl(ctx, siteCommandTimeout, "patch", "node", node, "--type=merge", "-p", string(merge))
	return err
}

func (d siteClusterClient) drainNode(ctx context.Context, node string) error {
	_, err := d.site.Kctl(ctx, drainLimit, "drain", node, "--ignore-daemonsets", "--timeout="+drainLimit.String())
	return err
}
