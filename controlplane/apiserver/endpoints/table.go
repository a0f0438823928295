package endpoints

import (
	"fmt"
	"net/http"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	metav1beta1 "k8s.io/apimachinery/pkg/apis/meta/v1beta1"
	"k8s.io/apimachinery/pkg/runtime"

	"keelson.dev/keelson/controlplane/api"
)

// viewer converts objects of one kind to a view: table rows or metadata only.
type viewer struct {
	kind    *api.Kind
	format  Format
	include metav1.IncludeObjectPolicy
	handler *Handler
	headed  bool // the column definitions were already sent; a list or watch sends them once
}

func (h *Handler) newViewer(r *http.Request, k *api.Kind, format Format) (*viewer, error) {
	v := &viewer{kind: k, format: format, handler: h, include: metav1.IncludeMetadata}
	if format.As == viewTable {
		if format.Media == mediaProto {
			return nil, notAcceptable(mediaJSON, mediaYAML, mediaCBOR)
		}
		switch p := metav1.IncludeObjectPolicy(r.URL.Query().Get("includeObject")); p {
		case "":
		case metav1.IncludeNone, metav1.IncludeMetadata, metav1.IncludeObject:
			v.include = p
		default:
			return nil, apierrors.NewBadRequest(fmt.Sprintf("unrecognized includeObject value: %q", p))
		}
	}
	return v, nil
}

func (v *viewer) apiVersion() string { return metav1.GroupName + "/" + v.format.Version }

// viewObject converts an object or a list to the view. It returns a Status unchanged.
func (v *viewer) viewObject(obj runtime.Object) (runtime.Object, error) {
	if _, ok := obj.(*metav1.Status); ok {
		return obj, nil
	}
	list, isList := obj.(metav1.ListInterface)
	switch {
	case v.format.As == viewTable:
		return v.viewTable(obj)
	case isList && v.format.As == viewPartials:
		out := &metav1.PartialObjectMetadataList{
			TypeMeta: metav1.TypeMeta{APIVersion: v.apiVersion(), Kind: "PartialObjectMetadataList"},
			ListMeta: listMeta(list), Items: []metav1.PartialObjectMetadata{},
		}
		err := forEachItem(obj, func(o runtime.Object) error {
			p, err := v.viewMetadata(o)
			if err == nil {
				out.Items = append(out.Items, *p)
			}
			return err
		})
		if v.format.Version == "v1beta1" {
			old := metav1beta1.PartialObjectMetadataList(*out)
			return &old, err
		}
		return out, err
	case !isList && v.format.As == viewPartial:
		return v.viewMetadata(obj)
	}
	return nil, notAcceptable(mediaJSON, mediaYAML, mediaProto, mediaCBOR)
}

func listMeta(l metav1.ListInterface) metav1.ListMeta {
	return metav1.ListMeta{
		ResourceVersion: l.GetResourceVersion(), Continue: l.GetContinue(),
		RemainingItemCount: l.GetRemainingItemCount(),
	}
}

func (v *viewer) viewMetadata(obj runtime.Object) (*metav1.PartialObjectMetadata, error) {
	o, err := meta.Accessor(obj)
	if err != nil {
		return nil, apierrors.NewInternalError(err)
	}
	if typed, ok := obj.(api.Object); ok {
		o = v.kind.ClientView(typed)
	}
	p := meta.AsPartialObjectMetadata(o)
	p.TypeMeta = metav1.TypeMeta{APIVersion: v.apiVersion(), Kind: "PartialObjectMetadata"}
	return p, nil
}

func (v *viewer) viewTable(obj runtime.Object) (*metav1.Table, error) {
	t := &metav1.Table{TypeMeta: metav1.TypeMeta{APIVersion: v.apiVersion(), Kind: "Table"}, Rows: []metav1.TableRow{}}
	if !v.headed {
		t.ColumnDefinitions = v.kind.Lists.Columns
	}
	if len(t.ColumnDefinitions) == 0 {
		t.ColumnDefinitions = []metav1.TableColumnDefinition{}
	}
	now := v.handler.cfg.Clock()
	add := func(o runtime.Object) error {
		typed, ok := o.(api.Object)
		if !ok || v.kind.Lists.Row == nil {
			return notAcceptable(mediaJSON, mediaYAML, mediaProto, mediaCBOR)
		}
		row := metav1.TableRow{Cells: v.kind.Lists.Row(typed, now)}
		switch v.include {
		case metav1.IncludeObject:
			whole, err := v.kind.UnpackObject(typed)
			if err != nil {
				return apierrors.NewInternalError(err)
			}
			row.Object.Object = v.kind.ClientView(whole)
		case metav1.IncludeMetadata:
			p, err := v.viewMetadata(o)
			if err != nil {
				return err
			}
			row.Object.Object = p
		}
		t.Rows = append(t.Rows, row)
		return nil
	}
	if list, ok := obj.(metav1.ListInterface); ok {
		t.ListMeta = listMeta(list)
		if err := forEachItem(obj, add); err != nil {
			return nil, err
		}
		return t, nil
	}
	if o, err := meta.Accessor(obj); err == nil {
		t.ResourceVersion = o.GetResourceVersion()
	}
	return t, add(obj)
}

// forEachItem calls visit for each object of a list, until visit returns an error.
func forEachItem(list runtime.Object, visit func(runtime.Object) error) error {
	shared, ok := list.(*api.ObjectList)
	if !ok {
		return meta.EachListItem(list, visit)
	}
	for _, o := range shared.Items {
		if err := visit(o); err != nil {
			return err
		}
	}
	return nil
}
