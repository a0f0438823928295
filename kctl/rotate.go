package kctl

import (
	"cmp"
	"context"
	"fmt"
	"io"
	"slices"
	"strings"
	"text/tabwriter"
	"time"

	"github.com/spf13/cobra"
	"k8s.io/cli-runtime/pkg/genericiooptions"
	cmdutil "k8s.io/kubectl/pkg/cmd/util"

	"keelson.dev/keelson/controlplane/api"
	"keelson.dev/keelson/internal/wait"
	"keelson.dev/keelson/kctl/verb"
)

// keyKinds are the kinds of CAs and keys that 'kctl cluster rotate' can rotate.
var keyKinds = []string{"cluster-ca", "peers-ca", "service-account-key", "encryption-key"}

func rotateCommand(f cmdutil.Factory, streams genericiooptions.IOStreams) *cobra.Command {
	var q api.ClusterRotate
	status := false
	c := &cobra.Command{
		Use:   "rotate cluster-ca|peers-ca|service-account-key|encryption-key",
		Short: "Rotate a CA or key of the cluster without downtime",
		Long: "Rotate a CA or key of the cluster without downtime. The cluster runs the rotation in steps, and\n" +
			"continues it after the failure of any replica:\n" +
			"\n" +
			"  trust    every replica trusts the new key in addition to the previous one\n" +
			"  use      every replica signs or encrypts with the new key\n" +
			"  wait     the previous key stays trusted while its signatures are in use (see --grace-period)\n" +
			"  serve    only for cluster-ca: the API serves a certificate of the new CA\n" +
			"  forget   every replica deletes the previous key\n" +
			"\n" +
			"A rotation starts only if all replicas are reachable, and waits for a replica that becomes\n" +
			"unreachable. --status shows its name. Tokens in Secrets do not expire: they are signed again at\n" +
			"the end of the step 'wait', and copies of the previous tokens become invalid.\n" +
			"\n" +
			"A rotation of cluster-ca also waits for every node, and --status shows the nodes that delay it.\n" +
			"Clients that trust only the previous CA can reach the API until the step 'serve'. --status shows\n" +
			"the users whose certificates of the previous CA are in use. The kubeconfig in use is renewed when\n" +
			"the new CA signs. Renew every other kubeconfig with 'kctl cluster renew'.",
		Example: "  kctl cluster rotate peers-ca\n" +
			"  kctl cluster rotate cluster-ca\n" +
			"  kctl cluster rotate service-account-key --grace-period 2h\n" +
			"\n" +
			"  # Show the keys and the state of the rotation\n" +
			"  kctl cluster rotate --status\n" +
			"\n" +
			"  # Abort the rotation before the new key is used\n" +
			"  kctl cluster rotate --abort\n" +
			"\n" +
			"  # Stop listing the keys of the removed replica cp3\n" +
			"  kctl cluster rotate --clear-removed cp3",
		Args:      cobra.MaximumNArgs(1),
		ValidArgs: keyKinds,
	}
	output := outputFlag(c)
	c.Flags().BoolVar(&status, "status", false, "show the keys, and the state of a rotation that is in progress")
	c.Flags().BoolVar(&q.Abort, "abort", false,
		"abort the rotation that is in progress; possible until the new key is used")
	c.Flags().BoolVar(&q.Force, "force", false,
		"do not wait for the lifetime of previous signatures, which then become invalid, or for unreachable nodes, "+
			"which must join again; once all replicas trust the new key, do not wait for unreachable replicas, which "+
			"must join again")
	c.Flags().StringVar(&q.Dismiss, "clear-removed", "",
		"name of a removed replica whose keys are no longer listed, because its disk was destroyed")
	c.Flags().StringVar(&q.Keep, "grace-period", "",
		"how long the previous key stays trusted (default 25h for service-account-key, 24h for cluster-ca)")
	verb.AddPreviousFlag(c.Flags(), "clear-removed", "dismiss")
	verb.AddPreviousFlag(c.Flags(), "grace-period", "keep")
	c.RunE = func(_ *cobra.Command, args []string) error {
		if len(args) == 1 {
			q.Kind = args[0]
		}
		var all api.ClusterKeys
		method, body := "POST", any(q)
		switch {
		case status && (q != api.ClusterRotate{}):
			return fmt.Errorf("--status cannot be combined with other flags or a key")
		case status:
			method, body = "GET", nil
		case q.Dismiss != "" && q != api.ClusterRotate{Dismiss: q.Dismiss}:
			return fmt.Errorf("--clear-removed cannot be combined with other flags or a key")
		case q.Dismiss != "":
		case q == api.ClusterRotate{}, q.Kind == "" && !q.Abort && !q.Force:
			return fmt.Errorf("the key to rotate is missing: want %s, or --status", strings.Join(keyKinds, ", "))
		}
		if err := callAndPrint(f, streams, *output, method, api.PathClusterKeys, body, &all, printKeys); err != nil ||
			*output != "" || q.Kind != clusterCA || q.Abort {
			return err
		}
		return renewWhenSigned(f, streams, renewTimeout)
	}
	return c
}

const clusterCA = "cluster-ca"

// renewTimeout is how long 'kctl cluster rotate cluster-ca' waits until replicas sign with the new
// CA.
const renewTimeout = 30 * time.Second

// describeWaiting returns a text with the step of the rotation in progress, and the replicas, nodes
// and users that delay it. all.Rotation must be set.
func describeWaiting(all api.ClusterKeys) string {
	said := fmt.Sprintf("the rotation is at step %s", all.Rotation.Step)
	if len(all.Waiting) == 0 {
		return said
	}
	said += " and waits for " + strings.Join(all.Waiting[:min(len(all.Waiting), maxWaitingShown)], "; ")
	if more := len(all.Waiting) - maxWaitingShown; more > 0 {
		said += fmt.Sprintf("; and for %d more", more)
	}
	return said
}

// renewWhenSigned waits until replicas sign with the new cluster CA, and then renews the kubeconfig
// in use. If they do not within timeout, it prints how to continue, and returns nil.
func renewWhenSigned(f cmdutil.Factory, streams genericiooptions.IOStreams, timeout time.Duration) error {
	ctx, cancel := context.WithTimeout(context.Background(), timeout)
	defer cancel()
	over, _ := ctx.Deadline()
	why := "the cluster has not reported the step of the rotation"
	err := wait.For(ctx, time.Second, func() error {
		var all api.ClusterKeys
		if err := callAPIContext(ctx, f, "GET", api.PathClusterKeys, nil, &all); err != nil {
			// At the deadline, the last status explains more than the timeout. A request can fail
			// shortly before ctx is done, because the client compares its own clock with the
			// deadline.
			if ctx.Err() == nil && time.Now().Before(over) {
				why = err.Error()
			}
			return err
		}
		if r := all.Rotation; r != nil && (r.Step == "trust" || r.Step == "use") {
			why = describeWaiting(all)
			return fmt.Errorf("a rotation is in progress, at step %s: follow it with 'kctl cluster rotate --status'",
				r.Step)
		}
		return nil
	})
	if err != nil {
		fmt.Fprintf(streams.ErrOut, "The kubeconfig in use is as it was: after %s %s. 'kctl cluster rotate --status' "+
			"shows how it goes on; 'kctl cluster renew' when it is at step wait.\n",
			timeout, why)
		return nil
	}
	return renewKubeconfig(f, streams)
}

// printKeys writes to w a table of the keys by kind, with the replicas that sign with each key and
// the replicas that trust it. Errors of replicas, keys of removed replicas, and the state of the
// last rotation follow.
func printKeys(w io.Writer, all api.ClusterKeys) error {
	t := tabwriter.NewWriter(w, 0, 8, 3, ' ', 0)
	fmt.Fprintln(t, "KIND\tKEY\tSIGNS AT\tBELIEVED AT")
	for _, kind := range keyKinds {
		for _, id := range keyIDs(all, kind) {
			var signs, believed []string
			for _, h := range all.Replicas {
				for _, k := range h.Keys {
					switch {
					case k.Kind != kind:
					case k.Signs == id:
						signs = append(signs, h.Name)
					case slices.Contains(k.Believes, id):
						believed = append(believed, h.Name)
					}
				}
			}
			fmt.Fprintf(t, "%s\t%s\t%s\t%s\n", kind, shortKeyID(id), joinNames(signs), joinNames(believed))
		}
	}
	if err := t.Flush(); err != nil {
		return err
	}
	for _, h := range all.Replicas {
		if h.Problem != "" {
			fmt.Fprintf(w, "%s: %s\n", h.Name, h.Problem)
		}
	}
	for _, gone := range all.Removed {
		fmt.Fprintf(w, "%s was removed %s and has had keys that are good still: %s. If its disk may be in wrong hands "+
			"%s; 'kctl cluster rotate --clear-removed %[1]s' when it is wiped\n",
			gone.Name, formatTimestamp(gone.At), strings.Join(gone.Kinds, ", "), describeInvalidation(gone.Kinds))
	}
	return printRotation(w, all)
}

// clusterSecret is the kind of the cluster secret, the only key that cannot be rotated.
const clusterSecret = "cluster-secret"

// describeInvalidation returns a text that explains how to make the keys of the given kinds
// invalid. This is necessary because a removed replica has copies of these keys.
func describeInvalidation(kinds []string) string {
	exchanged := slices.DeleteFunc(slices.Clone(kinds), func(k string) bool { return k == clusterSecret })
	var ways []string
	if len(exchanged) > 0 {
		ways = append(ways, "'kctl cluster rotate' "+strings.Join(exchanged, ", "))
	}
	if len(exchanged) < len(kinds) {
		ways = append(ways, clusterSecret+" goes with a new cluster alone (docs/how-to/respond-to-a-leaked-key.md)")
	}
	return strings.Join(ways, ", ")
}

// rotationSteps returns the names of the steps with which a key of the given kind is rotated, in
// order.
func rotationSteps(kind string) []string {
	if kind == clusterCA {
		return []string{"trust", "use", "wait", "serve", "forget"}
	}
	return []string{"trust", "use", "wait", "forget"}
}

// maxWaitingShown is the maximum number of replicas, nodes and users that are printed because they
// delay a rotation.
const maxWaitingShown = 20

// printRotation writes the state of the last rotation to w. It writes nothing if there was no
// rotation.
func printRotation(w io.Writer, all api.ClusterKeys) error {
	r := all.Rotation
	if r == nil {
		return nil
	}
	var err error
	switch r.Step {
	case "done", "aborted":
		_, err = fmt.Fprintf(w, "exchange of %s: %s since %s\n", r.Kind, r.Step, formatTimestamp(r.Since))
	default:
		steps := rotationSteps(r.Kind)
		_, err = fmt.Fprintf(w, "exchange of %s: %s replaces %s; step %s, %d of %d, since %s\n",
			r.Kind, shortKeyID(r.New), shortKeyID(r.Old), r.Step, slices.Index(steps, r.Step)+1, len(steps),
			formatTimestamp(r.Since))
		for _, who := range all.Waiting[:min(len(all.Waiting), maxWaitingShown)] {
			fmt.Fprintf(w, "  waits for %s\n", who)
		}
		if more := len(all.Waiting) - maxWaitingShown; more > 0 {
			fmt.Fprintf(w, "  and for %d more\n", more)
		}
	}
	return err
}

// keyIDs returns the IDs of all keys of a kind that replicas have: first the signing keys, then the
// keys that are only trusted.
func keyIDs(all api.ClusterKeys, kind string) (ids []string) {
	for _, signing := range []bool{true, false} {
		for _, h := range all.Replicas {
			for _, k := range h.Keys {
				of := k.Believes
				if signing {
					of = []string{k.Signs}
				}
				for _, id := range of {
					if k.Kind == kind && id != "" && !slices.Contains(ids, id) {
						ids = append(ids, id)
					}
				}
			}
		}
	}
	return ids
}

// shortKeyID returns the first 16 characters of id if id is a digest, which suffice to distinguish
// keys. It returns any other id unchanged.
func shortKeyID(id string) string {
	if len(id) >= 43 { // only digests are that long
		return id[:16]
	}
	return id
}

func joinNames(of []string) string {
	return cmp.Or(strings.Join(of, ","), "-")
}
