package volumeprovision

import (
	"context"
	"fmt"
	"slices"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"keelson.dev/keelson/controlplane/api"
	"keelson.dev/keelson/controlplane/client"
	"keelson.dev/keelson/controlplane/controllers/engine"
)

// cloningFinalizer is on the source claim while its volume is being cloned. All provisioners use
// this finalizer. It keeps a source claim that is being deleted until its clones are created.
const cloningFinalizer = "provisioner.storage.kubernetes.io/cloning-protection"

// ofSource indexes PersistentVolumeClaims by their clone source: the claim, as namespace/name, from
// which their volume is to be cloned.
const ofSource = "keelson.claimsOfSource"

// cloneSource returns the name of the claim from which a claim's volume is to be cloned, or "".
func cloneSource(c *corev1.PersistentVolumeClaim) string {
	if from := c.Spec.DataSource; from != nil && from.Kind == "PersistentVolumeClaim" &&
		(from.APIGroup == nil || *from.APIGroup == "") {
		return from.Name
	}
	return ""
}

func sourcesOf(o api.Object) []string {
	if c, ok := o.(*corev1.PersistentVolumeClaim); ok && cloneSource(c) != "" {
		return []string{c.Namespace + "/" + cloneSource(c)}
	}
	return nil
}

// keysOfClaim returns the keys to reconcile when claim c changes: c itself and its clone source,
// which may no longer need cloningFinalizer.
func keysOfClaim(c *corev1.PersistentVolumeClaim) []engine.Key {
	keys := []engine.Key{{Kind: claimKey, Namespace: c.Namespace, Name: c.Name}}
	if from := cloneSource(c); from != "" {
		keys = append(keys, engine.Key{Kind: claimKey, Namespace: c.Namespace, Name: from})
	}
	return keys
}

// protectSource adds cloningFinalizer to the clone source of claim c, if c has a clone source. It
// is called before the driver is called.
func (p *provisioner) protectSource(ctx context.Context, c *corev1.PersistentVolumeClaim) error {
	name := cloneSource(c)
	if name == "" {
		return nil
	}
	from, err := client.Get[*corev1.PersistentVolumeClaim](ctx, p.term.Client, c.Namespace, name)
	switch {
	case err != nil:
		return fmt.Errorf("PersistentVolumeClaim %s cannot be read: %w", name, err)
	case slices.Contains(from.Finalizers, cloningFinalizer):
		return nil
	case from.DeletionTimestamp != nil:
		return fmt.Errorf("PersistentVolumeClaim %s is being deleted", name)
	}
	next := from.DeepCopy()
	next.Finalizers = append(next.Finalizers, cloningFinalizer)
	return p.updateClaim(ctx, next)
}

// sourceGone reports whether claim c has a clone source that no longer exists.
func (p *provisioner) sourceGone(ctx context.Context, c *corev1.PersistentVolumeClaim) bool {
	name := cloneSource(c)
	if name == "" {
		return false
	}
	_, err := client.Get[*corev1.PersistentVolumeClaim](ctx, p.term.Client, c.Namespace, name)
	return apierrors.IsNotFound(err)
}

// isCopying reports whether claim source must be kept as the clone source of claim c. It must be
// kept once provisioning for c has started, until c no longer has ClaimFinalizer. Before
// provisioning starts, it must be kept only while source is not being deleted, because provisioning
// does not start after that.
func isCopying(c, source *corev1.PersistentVolumeClaim) bool {
	if cloneSource(c) != source.Name || c.Namespace != source.Namespace {
		return false
	}
	begun := slices.Contains(c.Finalizers, ClaimFinalizer)
	return begun || source.DeletionTimestamp == nil && c.DeletionTimestamp == nil && c.Spec.VolumeName == ""
}

// unprotectSource removes cloningFinalizer from claim c if no claim is being cloned from it. Before
// that it lists the claims from the API, because the cache may be outdated. It does nothing if the
// volume of c belongs to a driver that has its own provisioner.
func (p *provisioner) unprotectSource(ctx context.Context, c *corev1.PersistentVolumeClaim) error {
	if !slices.Contains(c.Finalizers, cloningFinalizer) {
		return nil
	}
	if others, err := p.othersVolume(ctx, c); err != nil || others {
		return err
	}
	keeps := func(o *corev1.PersistentVolumeClaim) bool { return isCopying(o, c) }
	for _, o := range engine.CachedBy[*corev1.PersistentVolumeClaim](p.claimsCache, ofSource, c.Namespace+"/"+c.Name) {
		if now, ok := p.claims.Get(o.Namespace, o.Name); ok && keeps(now) {
			return nil
		}
	}
	live, err := client.List[*corev1.PersistentVolumeClaim](ctx, p.term.Client, c.Namespace, metav1.ListOptions{})
	if err != nil {
		return fmt.Errorf("listing the claims that may be cloned from claim %s/%s: %w", c.Namespace, c.Name, err)
	}
	if slices.ContainsFunc(live, keeps) {
		return nil
	}
	next := c.DeepCopy()
	next.Finalizers = slices.DeleteFunc(next.Finalizers, func(f string) bool { return f == cloningFinalizer })
	if next, err = client.Update(ctx, p.term.Client, next); err != nil {
		if apierrors.IsNotFound(err) {
			return nil
		}
		return err
	}
	p.claims.RecordWrite(next)
	return nil
}

// othersVolume reports whether the volume of claim c belongs to a driver that has its own
// provisioner. If the PersistentVolume is not cached, it is read from the API.
func (p *provisioner) othersVolume(ctx context.Context, c *corev1.PersistentVolumeClaim) (bool, error) {
	name := c.Spec.VolumeName
	if name == "" {
		return false, nil
	}
	v, ok := p.volumes.Get("", name)
	if !ok {
		var err error
		if v, err = client.Get[*corev1.PersistentVolume](ctx, p.term.Client, "", name); apierrors.IsNotFound(err) {
			return false, nil
		} else if err != nil {
			return false, fmt.Errorf("reading PersistentVolume %s of claim %s/%s: %w", name, c.Namespace, c.Name, err)
		}
	}
	return v.Spec.CSI != nil && !p.isServed(v.Spec.CSI.Driver), nil
}
