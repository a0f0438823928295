package volumeattributes

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"time"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"google.golang.org/grpc/status"
	corev1 "k8s.io/api/core/v1"
	rbacv1 "k8s.io/api/rbac/v1"
	storagev1 "k8s.io/api/storage/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/client-go/tools/cache"

	"keelson.dev/keelson/controlplane/api"
	"keelson.dev/keelson/controlplane/client"
	"keelson.dev/keelson/controlplane/controllers/engine"
)

// New returns the controller that modifies volumes. calls is the client with which CSI drivers are
// called through the agents of the nodes. If calls is nil, the controller calls no driver.
func New(d engine.Deps, calls api.NodeDrivers) *engine.Descriptor {
	i := d.Informers
	claims, volumes := client.Informer[*corev1.PersistentVolumeClaim](i), client.Informer[*corev1.PersistentVolume](i)
	classes, drivers := client.Informer[*storagev1.VolumeAttributesClass](i), client.Informer[*storagev1.CSIDriver](i)
	csiNodes, nodes := client.Informer[*storagev1.CSINode](i), client.Informer[*corev1.Node](i)
	engine.Index(claims, engine.AttributesClassIndex, engine.ClaimAttributesClasses)
	return &engine.Descriptor{
		Name:    "volume-attributes-controller",
		Workers: 2,
		Watches: []engine.Watch{
			engine.OnInformer(claims, engine.Self[*corev1.PersistentVolumeClaim]),
			engine.OnInformer(classes, func(c engine.Change[*storagev1.VolumeAttributesClass]) (keys []engine.Key) {
				for _, pvc := range engine.CachedBy[*corev1.PersistentVolumeClaim](claims,
					engine.AttributesClassIndex, c.New.Name) {
					keys = append(keys, engine.Key{Namespace: pvc.Namespace, Name: pvc.Name})
				}
				return keys
			}),
			// These informers are only read: unfinished modifications are retried.
			engine.OnInformer(volumes, func(engine.Change[*corev1.PersistentVolume]) []engine.Key { return nil }),
			engine.OnInformer(drivers, func(engine.Change[*storagev1.CSIDriver]) []engine.Key { return nil }),
			engine.OnInformer(csiNodes, func(engine.Change[*storagev1.CSINode]) []engine.Key { return nil }),
			engine.OnInformer(nodes, func(engine.Change[*corev1.Node]) []engine.Key { return nil }),
		},
		Rules: []rbacv1.PolicyRule{
			{APIGroups: []string{""}, Resources: []string{"persistentvolumes"},
				Verbs: []string{"get", "list", "update", "watch"}},
			{APIGroups: []string{""}, Resources: []string{"persistentvolumeclaims", "nodes"},
				Verbs: []string{"get", "list", "watch"}},
			{APIGroups: []string{""}, Resources: []string{"persistentvolumeclaims/status"}, Verbs: []string{"update"}},
			{APIGroups: []string{""}, Resources: []string{"secrets"}, Verbs: []string{"get"}},
			{APIGroups: []string{"storage.k8s.io"},
				Resources: []string{"volumeattributesclasses", "csidrivers", "csinodes"},
				Verbs:     []string{"get", "list", "watch"}},
			{APIGroups: []string{""}, Resources: []string{"events"}, Verbs: []string{"create", "patch", "update"}},
		},
		Lead: func(t *engine.Term) engine.Reconcile {
			m := &modifier{term: t, calls: t.Drivers(calls), classes: classes, drivers: drivers, csiNodes: csiNodes,
				nodes: nodes, lastWaits: map[engine.Key]string{},
				claims:  engine.ViewOf[*corev1.PersistentVolumeClaim](t, claims),
				volumes: engine.ViewOf[*corev1.PersistentVolume](t, volumes)}
			return m.reconcileClaim
		},
	}
}

// modifier reconciles claims during one term of leadership. Every term has a new modifier.
type modifier struct {
	term    *engine.Term
	calls   *engine.LeaderDrivers
	claims  *engine.View[*corev1.PersistentVolumeClaim]
	volumes *engine.View[*corev1.PersistentVolume]

	classes, drivers, csiNodes, nodes cache.SharedIndexInformer

	mu        sync.Mutex
	lastWaits map[engine.Key]string // text of the last event about what each claim waits for
}

func (m *modifier) reconcileClaim(ctx context.Context, key engine.Key) (time.Duration, error) {
	var step Step
	c, ok := m.claims.Get(key.Namespace, key.Name)
	var v *corev1.PersistentVolume
	if ok {
		v, _ = m.volumes.Get("", c.Spec.VolumeName)
		step = PlanModification(c, v, m.attributesClass, m.calls != nil && engine.IsVolumeServedByAgent(m.drivers, v),
			m.term.Now())
	}
	waits := ""
	if step.Status == nil && step.Modify == nil {
		waits = step.Message
	}
	if !m.isNew(key, waits) {
		return step.After, nil
	}
	var err error
	if step.Modify != nil {
		err = m.modifyVolume(ctx, c, v, step.Modify)
	} else {
		err = m.writeStep(ctx, c, step)
	}
	switch {
	case apierrors.IsConflict(err) || apierrors.IsNotFound(err):
		return 0, engine.RaceError("%s: %w", key, err)
	case err != nil:
		return 0, fmt.Errorf("the attributes of the volume of claim %s: %w", key, err)
	}
	return step.After, nil
}

func (m *modifier) attributesClass(name string) *storagev1.VolumeAttributesClass {
	c, _ := engine.Cached[*storagev1.VolumeAttributesClass](m.classes, "", name)
	return c
}

// writeStep writes the claim status that step contains to claim c, and records the event of step.
func (m *modifier) writeStep(ctx context.Context, c *corev1.PersistentVolumeClaim, step Step) error {
	if step.Status != nil {
		next := c.DeepCopy()
		next.Status = *step.Status
		next, err := client.UpdateStatus(ctx, m.term.Client, next)
		if err != nil {
			return err
		}
		m.claims.RecordWrite(next)
	}
	if step.Reason != "" {
		kind := corev1.EventTypeNormal
		if step.Warning {
			kind = corev1.EventTypeWarning
		}
		m.term.Events.Event(c, kind, step.Reason, step.Message)
	}
	return nil
}

// modifyVolume calls the driver to apply a class to volume v of claim c. Afterwards it updates the
// PersistentVolume, and then the status of the claim.
func (m *modifier) modifyVolume(
	ctx context.Context, c *corev1.PersistentVolumeClaim, v *corev1.PersistentVolume,
	class *storagev1.VolumeAttributesClass,
) error {
	node := ""
	secrets, err := engine.ReadDriverSecret(ctx, m.term.Client, secretOf(v))
	if err != nil {
		// drop the type of the error: the caller would treat NotFound as a conflict of the claim
		err = errors.New(err.Error())
	} else {
		node, err = m.callModify(ctx, v, class, secrets)
	}
	if err != nil {
		if node != "" {
			err = fmt.Errorf("node %s: %w", node, err)
		}
		step := Failed(c, class.Name, err, status.Code(err), m.term.Now())
		if noted := m.writeStep(ctx, c, step); noted != nil {
			return noted
		}
		if s := step.Status; s != nil && s.ModifyVolumeStatus.Status ==
			corev1.PersistentVolumeClaimModifyVolumeInfeasible {
			return nil // the call is repeated after infeasibleFor, or when the claim names another class
		}
		return err
	}
	if has := v.Spec.VolumeAttributesClassName; has == nil || *has != class.Name {
		next := v.DeepCopy()
		next.Spec.VolumeAttributesClassName = &class.Name
		if next, err = client.Update(ctx, m.term.Client, next); err != nil {
			return err
		}
		m.volumes.RecordWrite(next)
	}
	return m.writeStep(ctx, c, Modified(c, v.Name, class.Name))
}

// callModify calls ControllerModifyVolume through the agent of a node that can reach volume v. node
// is the node that it called last.
func (m *modifier) callModify(
	ctx context.Context, v *corev1.PersistentVolume, class *storagev1.VolumeAttributesClass, secrets map[string]string,
) (node string, err error) {
	driver := v.Spec.CSI.Driver
	return engine.CallReachingNodes(v, m.csiNodes, m.nodes, func(node string) error {
		if err := engine.CheckModifyVolume(ctx, m.calls, node, driver); err != nil {
			return err
		}
		_, err := engine.DriverController(m.calls, node, driver).ControllerModifyVolume(ctx,
			&csi.ControllerModifyVolumeRequest{
				VolumeId: v.Spec.CSI.VolumeHandle, MutableParameters: class.Parameters, Secrets: secrets})
		return err
	})
}

// secretOf returns the Secret that volume v names for ControllerModifyVolume. If it names none,
// secretOf returns the Secret for expansion.
func secretOf(v *corev1.PersistentVolume) *corev1.SecretReference {
	name, namespace := v.Annotations[engine.ModifySecretName], v.Annotations[engine.ModifySecretNamespace]
	if name == "" || namespace == "" {
		return v.Spec.CSI.ControllerExpandSecretRef
	}
	return &corev1.SecretReference{Namespace: namespace, Name: name}
}

// isNew reports whether an event of a claim must be recorded. waits is the text about what the
// claim waits for; "" means that it does not wait. The result is false only for a text that equals
// the text of the claim's last event. isNew stores waits as that text.
func (m *modifier) isNew(key engine.Key, waits string) bool {
	m.mu.Lock()
	defer m.mu.Unlock()
	before := m.lastWaits[key]
	delete(m.lastWaits, key)
	if waits != "" {
		m.lastWaits[key] = waits
	}
	return waits == "" || waits != before
}
