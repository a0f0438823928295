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
	"keelson.dev/keelson/controlplane/registry"
	"keelson.dev/keelson/raftstore"
	"keelson.dev/keelson/raftstore/mvcc"
	"keelson.dev/keelson/raftstore/replica"
)

// A backup must not bring back who was shut out since. What was revoked is carried over from the previous data, where there
// is some; and no join token of the backup is good any more, for it may have been used up, or taken back, since. Nodes that joined since are
// carried over likewise: they may have volumes, and have to be heard like the others.

// carried is what a restore makes of the records by which nodes come in.
type carried struct {
	form    registry.Form
	before  []*v1.Secret     // revocations in the previous data
	revoked []string         // nodes that are revoked now, and were not in the backup, or for less long
	tokens  int              // that have ended
	nodes   []raftstore.Item // Nodes in the previous data
	joined  []string         // those of them that are not in the backup
	foreign bool             // the backup is of another cluster, the keys of whose removed replicas are good for nothing here
	// revision is that of the previous data; 0 = not known.
	revision raftstore.Revision
	// identity is the identity of the previous data; zero = not known.
	identity datadir.IdentityRecord
}

func newCarried() carried {
	return carried{form: registry.FormOf(kinds.All().ByType(&v1.Secret{}).Storage)}
}

// clusterSecrets are the Secrets of a type among the cluster's own whose names begin like that. One that cannot be read is an
// error, beside the others.
func (c *carried) clusterSecrets(v *mvcc.View, prefix string, of v1.SecretType) (out []*v1.Secret, err error) {
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
			if s, ok := obj.(*v1.Secret); ok && s.Type == of {
				out = append(out, s)
			}
		}
		if !page.More {
			return out, err
		}
	}
}

// read takes the revocations of a replica's data.
func (c *carried) read(conf replica.Config) error {
	v, err := replica.State(conf)
	if err != nil {
		return err
	}
	c.revision, c.identity = v.Revision(), datadir.ReadIdentity(v)
	c.before, err = c.clusterSecrets(v, pki.RevocationPrefix, pki.RevocationSecretType)
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

func nodeForm() registry.Form { return registry.FormOf(kinds.All().ByType(&v1.Node{}).Storage) }

// strangers returns writes for the Nodes of the previous data that an earlier backup lacks. Each Node is written without its
// podCIDR and gets a new one, because another Node of the backup can have the same podCIDR.
func (c *carried) strangers(v *mvcc.View) (ops []raftstore.Op, err error) {
	if c.foreign || c.revision <= v.Revision() {
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
			continue // as in the previous store, nobody goes by it
		}
		unheardNode(n)
		n.Spec.PodCIDR, n.Spec.PodCIDRs = "", nil
		value, err := form.Encode(n)
		if err != nil {
			return nil, fmt.Errorf("carrying over node %s: %w", n.Name, err)
		}
		ops = append(ops, raftstore.Put(it.Key, value))
		c.joined = append(c.joined, n.Name)
	}
	return ops, nil
}

// amend says what becomes of a backup's state.
func (c *carried) amend(v *mvcc.View) (ops []raftstore.Op, err error) {
	// What is of no form that is known is no token that anybody could use.
	tokens, _ := c.clusterSecrets(v, pki.TokenSecretPrefix, pki.TokenSecretType)
	c.tokens = len(tokens)
	for _, t := range tokens {
		ops = append(ops, raftstore.Delete(c.form.Key(t.Namespace, t.Name)))
	}
	for _, s := range c.before {
		r, _ := pki.RevocationOf(s)
		key := c.form.Key(s.Namespace, s.Name)
		if it, ok := v.Get(key); ok {
			if obj, err := c.form.Decode(it); err == nil {
				have, _ := obj.(*v1.Secret)
				if was, ok := pki.RevocationOf(have); ok {
					if !r.At.After(was.At) && (was.Named || !r.Named) {
						continue
					}
					r = r.Or(was)
				}
			}
		}
		r.UID = "" // a Node that the backup brings back has its own again: when it is deleted, that counts anew
		next := s.DeepCopy()
		next.Data = r.Record().Data
		value, err := c.form.Encode(next)
		if err != nil {
			return nil, fmt.Errorf("carrying over that node %s is revoked: %w", r.Node, err)
		}
		ops = append(ops, raftstore.Put(key, value))
		c.revoked = append(c.revoked, r.Node)
	}
	slices.Sort(c.revoked)
	if c.foreign {
		ops = append(ops, raftstore.Delete(datadir.RemovedMembersKey))
	}
	joined, err := c.strangers(v)
	if err != nil {
		return nil, err
	}
	more, err := unheard(v)
	return slices.Concat(ops, joined, more), err
}

// carry reads what is carried over from the previous data, which is in the data folder, or where it was moved aside last. The
// error says why it is not known, or not for certain, what was revoked in the end.
func carry(d datadir.Dir, conf replica.Config, replace bool, into *carried) error {
	has, err := d.HasRaftData()
	if err != nil || has && !replace {
		return err // the restore is refused
	}
	if has {
		return into.read(conf)
	}
	missing := errors.New("there is no previous data here")
	aside, err := filepath.Glob(conf.DataDir + ".aside-*")
	if err != nil || len(aside) == 0 {
		return missing
	}
	conf.DataDir = slices.Max(aside) // their names tell when
	return errors.Join(missing, into.read(conf))
}
