// Package restoretest compares the objects of a restored backup with the counts in the backup, and
// with the cluster from which the backup was made. It does no I/O: the caller reads the objects.
package restoretest

import (
	"bytes"
	"cmp"
	"crypto/sha256"
	"encoding/json"
	"fmt"
	"io"
	"maps"
	"slices"
	"strconv"
	"strings"
	"text/tabwriter"
)

// Object contains the revision of an API object and a digest of its content, to compare the object
// in two API servers.
type Object struct {
	Revision uint64            // resourceVersion of the object
	Sum      [sha256.Size]byte // SHA-256 digest of the JSON of the object, without heartbeats
}

// Kind contains the objects of one resource in the restored backup (Restored) and in the cluster
// (Live), by namespace/name.
type Kind struct {
	Name     string // name of the resource, such as pods or deployments.apps
	Held     int    // number of objects in the backup
	Expiring int    // number of objects in the backup that may have expired since the backup was made
	Restored map[string]Object
	Live     map[string]Object // nil if the backup is not compared with the cluster
	Problem  string            // error while reading the objects, or empty
}

// Row is the result of the comparison of one resource, as a row of the printed table.
type Row struct {
	Name     string   `json:"name"`
	Held     int      `json:"backup"` // number of objects in the backup
	Restored int      `json:"restored"`
	Live     int      `json:"cluster"`
	Asked    bool     `json:"clusterAsked"`
	Same     int      `json:"same"`            // number of objects equal in the backup and the cluster
	Since    int      `json:"since"`           // number of objects created, changed or deleted since the backup
	Wrong    []string `json:"wrong,omitempty"` // errors of the backup, one sentence each
}

// maxWrongListed is the maximum number of wrong objects that Row.Wrong names.
const maxWrongListed = 5

// Compare returns the result of the comparison of one resource. backupRevision is the store
// revision at which the backup was made. An object that has not changed in the cluster since that
// revision must be restored with the same content. Every object of the backup must be served,
// except expired objects. No restored object may be newer than the backup.
func Compare(k Kind, backupRevision uint64) Row {
	r := Row{Name: k.Name, Held: k.Held, Restored: len(k.Restored), Live: len(k.Live), Asked: k.Live != nil}
	if k.Problem != "" {
		r.Wrong = append(r.Wrong, k.Problem)
		return r
	}
	var wrong []string
	if lost := k.Held - len(k.Restored); lost < 0 || lost > k.Expiring {
		r.Wrong = append(r.Wrong, fmt.Sprintf("the backup holds %d objects, and %d are served", k.Held,
			len(k.Restored)))
	}
	for _, name := range slices.Sorted(maps.Keys(k.Restored)) {
		if o := k.Restored[name]; o.Revision > backupRevision {
			wrong = append(wrong, fmt.Sprintf("%s is of revision %d, and the backup of %d", name, o.Revision,
				backupRevision))
		}
		if _, there := k.Live[name]; r.Asked && !there {
			r.Since++
		}
	}
	mayBeGone := k.Expiring
	for _, name := range slices.Sorted(maps.Keys(k.Live)) {
		live, restored := k.Live[name], k.Restored[name]
		_, there := k.Restored[name]
		switch {
		case live.Revision > backupRevision:
			r.Since++
		case !there && mayBeGone > 0:
			mayBeGone--
			r.Since++
		case !there:
			wrong = append(wrong, fmt.Sprintf("%s is in the cluster since revision %d, and not in the backup of %d",
				name, live.Revision, backupRevision))
		case live.Revision != restored.Revision:
			wrong = append(wrong, fmt.Sprintf("%s is of revision %d in the cluster and of %d in the backup", name,
				live.Revision, restored.Revision))
		case live.Sum != restored.Sum:
			wrong = append(wrong, fmt.Sprintf("%s says something else in the cluster, at the same revision %d", name,
				live.Revision))
		default:
			r.Same++
		}
	}
	if more := len(wrong) - maxWrongListed; more > 0 {
		wrong = append(wrong[:maxWrongListed], fmt.Sprintf("and %d more", more))
	}
	r.Wrong = append(r.Wrong, wrong...)
	return r
}

// AllCorrect reports whether no row contains an error, so that the backup is correct.
func AllCorrect(rows []Row) bool {
	return !slices.ContainsFunc(rows, func(r Row) bool { return len(r.Wrong) > 0 })
}

// Print writes to w a table with a row for each resource that has objects, and the errors of all
// rows below it.
func Print(w io.Writer, rows []Row) error {
	rows = slices.DeleteFunc(slices.Clone(rows), func(r Row) bool {
		return r.Held+r.Restored+r.Live == 0 && len(r.Wrong) == 0
	})
	slices.SortFunc(rows, func(a, b Row) int { return cmp.Compare(a.Name, b.Name) })
	t := tabwriter.NewWriter(w, 0, 8, 3, ' ', 0)
	fmt.Fprintln(t, "KIND\tBACKUP\tRESTORED\tCLUSTER\tSAME\tSINCE\tVERDICT")
	for _, r := range rows {
		live, same, since := "-", "-", "-"
		if r.Asked {
			live, same, since = strconv.Itoa(r.Live), strconv.Itoa(r.Same), strconv.Itoa(r.Since)
		}
		verdict := "good"
		if len(r.Wrong) > 0 {
			verdict = "WRONG"
		}
		fmt.Fprintf(t, "%s\t%d\t%d\t%s\t%s\t%s\t%s\n", r.Name, r.Held, r.Restored, live, same, since, verdict)
	}
	if err := t.Flush(); err != nil {
		return err
	}
	for _, r := range rows {
		for _, s := range r.Wrong {
			if _, err := fmt.Fprintf(w, "%s: %s\n", r.Name, s); err != nil {
				return err
			}
		}
	}
	return nil
}

// ParseItem parses an item of a list response, and returns its name (namespace/name) and its
// Object. The digest in the Object does not include the heartbeat times of Nodes and of their
// Leases. The API server adds these times to its responses; the store does not contain them.
func ParseItem(resource string, item []byte) (name string, o Object, err error) {
	var obj map[string]any
	d := json.NewDecoder(bytes.NewReader(item))
	d.UseNumber()
	if err := d.Decode(&obj); err != nil {
		return "", o, fmt.Errorf("reading an item of the list of %s: %w", resource, err)
	}
	meta, _ := obj["metadata"].(map[string]any)
	text := func(key string) string { s, _ := meta[key].(string); return s }
	name = strings.TrimPrefix(text("namespace")+"/"+text("name"), "/")
	if o.Revision, err = strconv.ParseUint(text("resourceVersion"), 10, 64); err != nil {
		return name, o, fmt.Errorf("%s: resourceVersion %q: %w", name, text("resourceVersion"), err)
	}
	switch {
	case resource == "nodes":
		withoutHeartbeats(obj)
	case resource == "leases.coordination.k8s.io" && text("namespace") == "kube-node-lease":
		if spec, _ := obj["spec"].(map[string]any); spec != nil {
			delete(spec, "renewTime")
			delete(spec, "leaseDurationSeconds") // the API server sets it together with the heartbeat
		}
	}
	raw, err := json.Marshal(obj) // json.Marshal sorts the keys of maps
	o.Sum = sha256.Sum256(raw)
	return name, o, err
}

// withoutHeartbeats removes the heartbeat times from node, the decoded JSON of a Node.
func withoutHeartbeats(node map[string]any) {
	status, _ := node["status"].(map[string]any)
	conditions, _ := status["conditions"].([]any)
	for _, c := range conditions {
		if c, ok := c.(map[string]any); ok {
			delete(c, "lastHeartbeatTime")
		}
	}
}
