package recovery

import (
	"errors"
	"fmt"
	"path/filepath"
	"slices"

	v1 "k8s.io/api/core/v1"

	"keelson.dev/keelson/controlplane/api/kinds"
	"keelson.dev/keelson/controlplane/datadir"
	"keelson.dev/keelson/controlplane/pki"
	"keelson.dev/keelson/controlplane/registry/storedform"
	"keelson.dev/keelson/raftstore"
	"keelson.dev/keelson/raftstore/mvcc"
	"keelson.dev/keelson/raftstore/replica"
)

// A restore must not readmit nodes that were revoked after the backup was made. The revocations are
// therefore copied from the previous data of this replica, if that exists. Nodes that joined after
// the backup are copied too: they may have mounted volumes, and must report them like other nodes.
// All join tokens in the backup are deleted, because they may have been used or deleted since.

// previousData contains what a restore keeps of the data that this replica had before: revocations
// and Nodes. It also records the changes that the restore makes to the state in the backup.
type previousData struct {
	form        storedform.Form
	revocations []*v1.Secret // revocations in the previous data
	// names of the nodes with a copied revocation that is missing in the backup, or older there
	revoked []string
	tokens  int              // number of join tokens that were deleted from the state in the backup
	nodes   []raftstore.Item // Nodes in the previous data
	joined  []string         // names of the Nodes that were copied from the previous data
	// the backup is of another cluster, so its list of removed replicas is deleted
	otherCluster bool
	// revision is the revision of the previous data; 0 if it is unknown.
	revision raftstore.Revision
	// identity is the identity record of the previous data; the zero value if it is unknown.
	identity datadir.IdentityRecord
}

func newPreviousData() previousData {
	return previousData{form: storedform.NewForm(kinds.All().ByType(&v1.Secret{}).Storage)}
}

// listSecrets returns the Secrets in pki.TokenNamespace with the given type and name prefix. It
// skips Secrets that cannot be decoded, and returns their errors.
func (c *previousData) listSecrets(v *mvcc.View, prefix string, secretType v1.SecretType) (
	out []*v1.Secret, err error,
) {
	o := raftstore.ListOptions{Limit: 1000}
	for {
		page, listed := v.List(c.form.Key(pki.TokenNamespace, prefix), o)
		if listed != nil {
			return out, errors.Join(err, listed)
		}
		for _, it := range page.Items {
			o.After = it.Key
			obj, bad := c.form.Decode(it)
			if err = errors.Join(err, bad); bad != nil {
				continue
			}
			if s, ok := obj.(*v1.Secret); ok && s.Type == secretType {
				out = append(out, s)
			}
		}
		if !page.More {
			return out, err
		}
	}
}

// readState reads the revocations, the Nodes, the revision and the identity record from the store
// with the configuration conf into c.
func (c *previousData) readState(conf replica.Config) error {
	v, err := replica.State(conf)
	if err != nil {
		return err
	}
	c.revision, c.identity = v.Revision(), datadir.ReadIdentity(v)
	c.revocations, err = c.listSecrets(v, pki.RevocationPrefix, pki.RevocationSecretType)
	for o := (raftstore.ListOptions{Limit: 1000}); ; {
		page, bad := v.List(nodeForm().Key("", ""), o)
		if bad != nil {
			return errors.Join(err, bad)
		}
		c.nodes = append(c.nodes, page.Items...)
		if !page.More {
			return err
		}
		o.After = page.Items[len(page.Items)-1].Key
	}
}

func nodeForm() storedform.Form { return storedform.NewForm(kinds.All().ByType(&v1.Node{}).Storage) }

// missingNodeOps returns operations that create the Nodes of the previous data that v, the state in
// the backup, does not contain. The result is empty if the previous data is not newer than the
// backup, or if the backup is of another cluster. Each Node is created without its podCIDR, because
// a Node in the backup may have the same podCIDR. The Node will get a new podCIDR.
func (c *previousData) missingNodeOps(v *mvcc.View) (ops []raftstore.Op, err error) {
	if c.otherCluster || c.revision <= v.Revision() {
		return nil, nil
	}
	form := nodeForm()
	for _, it := range c.nodes {
		if _, ok := v.Get(it.Key); ok {
			continue
		}
		obj, bad := form.Decode(it)
		n, ok := obj.(*v1.Node)
		if bad != nil || !ok {
			continue // the previous store could not decode it either
		}
		resetNodeVolumes(n)
		n.Spec.PodCIDR, n.Spec.PodCIDRs = "", nil
		value, err := form.Encode(n)
		if err != nil {
			return nil, fmt.Errorf("copying node %s from the previous data: %w", n.Name, err)
		}
		ops = append(ops, raftstore.Put(it.Key, value))
		c.joined = append(c.joined, n.Name)
	}
	return ops, nil
}

// restoreOps returns the operations that a restore applies to v, the state in the backup. They
// delete join tokens, copy revocations and Nodes of the previous data, and mark all volumes as not
// attached (volumeResetOps).
func (c *previousData) restoreOps(v *mvcc.View) (ops []raftstore.Op, err error) {
	// A join token in a Secret that cannot be decoded cannot be used either.
	tokens, _ := c.listSecrets(v, pki.TokenSecretPrefix, pki.TokenSecretType)
	c.tokens = len(tokens)
	for _, t := range tokens {
		ops = append(ops, raftstore.Delete(c.form.Key(t.Namespace, t.Name)))
	}
	for _, s := range c.revocations {
		r, _ := pki.ParseRevocation(s)
		key := c.form.Key(s.Namespace, s.Name)
		if it, ok := v.Get(key); ok {
			if obj, err := c.form.Decode(it); err == nil {
				have, _ := obj.(*v1.Secret)
				if was, ok := pki.ParseRevocation(have); ok {
					if !r.At.After(was.At) && (was.Named || !r.Named) {
						continue
					}
					r = r.Merge(was)
				}
			}
		}
		r.UID = "" // The restored Node has this UID. It must be revoked again when the Node is deleted.
		next := s.DeepCopy()
		next.Data = r.Record().Data
		value, err := c.form.Encode(next)
		if err != nil {
			return nil, fmt.Errorf("copying the revocation of node %s: %w", r.Node, err)
		}
		ops = append(ops, raftstore.Put(key, value))
		c.revoked = append(c.revoked, r.Node)
	}
	slices.Sort(c.revoked)
	if c.otherCluster {
		ops = append(ops, raftstore.Delete(datadir.RemovedMembersKey))
	}
	joined, err := c.missingNodeOps(v)
	if err != nil {
		return nil, err
	}
	more, err := volumeResetOps(v)
	return slices.Concat(ops, joined, more), err
}

// loadPreviousData reads into previous what a restore keeps of this replica's previous data, such
// as the revocations and the Nodes. If the data directory d contains no data, it reads the newest
// data that an earlier restore or rebuild has moved aside, and returns an error. If d contains data
// and replace is false, it reads nothing, because Restore then returns an error. After an error,
// previous is usable but may be incomplete; the error says why.
func loadPreviousData(d datadir.Dir, conf replica.Config, replace bool, previous *previousData) error {
	has, err := d.HasRaftData()
	if err != nil || has && !replace {
		return err // Restore will return an error
	}
	if has {
		return previous.readState(conf)
	}
	missing := errors.New("there is no previous data here")
	aside, err := filepath.Glob(conf.Storage.DataDir + ".aside-*")
	if err != nil || len(aside) == 0 {
		return missing
	}
	conf.Storage.DataDir = slices.Max(aside) // names of these directories contain the time
	return errors.Join(missing, previous.readState(conf))
}
