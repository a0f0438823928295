package endpoints

import (
	"fmt"
	"net/http"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/runtime"
)

// Document responds with an object that is not a resource, such as a discovery document. It uses
// the best media type of the Accept header.
func (h *Handler) Document(w http.ResponseWriter, r *http.Request, obj runtime.Object) {
	f, err := negotiate(r, func(f Format) bool { return f.As == viewObject && !f.sequence }, mediaJSON, mediaYAML, mediaProto, mediaCBOR)
	if err != nil {
		h.Error(w, r, err)
		return
	}
	h.document(w, r, obj, f, "")
}

// DocumentAs is Document with a given media type. params are appended to the Content-Type.
func (h *Handler) DocumentAs(w http.ResponseWriter, r *http.Request, obj runtime.Object, media, params string) {
	f, ok := acceptable(Clause{Media: media})
	if !ok || f.sequence {
		h.Error(w, r, notAcceptable(mediaJSON, mediaYAML, mediaProto, mediaCBOR))
		return
	}
	f.Pretty = wantsPretty(r)
	h.document(w, r, obj, f, params)
}

func (h *Handler) document(w http.ResponseWriter, r *http.Request, obj runtime.Object, f Format, params string) {
	data, err := h.encode(obj, f)
	if err != nil {
		h.Error(w, r, apierrors.NewInternalError(fmt.Errorf("encoding a document: %w", err)))
		return
	}
	writeBytes(w, r, f.Media+params, http.StatusOK, data)
}
