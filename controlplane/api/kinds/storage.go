package kinds

import (
	storagev1 "k8s.io/api/storage/v1"

	"keelson.dev/keelson/controlplane/api"
)

func storageClassKind() *api.Kind {
	k := newKind[storagev1.StorageClass, storagev1.StorageClassList](names{
		gv: storagev1.SchemeGroupVersion, kind: "StorageClass", plural: "storageclasses", singular: "storageclass", short: []string{"sc"},
	})
	return k
}

func csiDriverKind() *api.Kind {
	k := newKind[storagev1.CSIDriver, storagev1.CSIDriverList](names{
		gv: storagev1.SchemeGroupVersion, kind: "CSIDriver", plural: "csidrivers", singular: "csidriver",
	})
	return k
}

func csiNodeKind() *api.Kind {
	k := newKind[storagev1.CSINode, storagev1.CSINodeList](names{
		gv: storagev1.SchemeGroupVersion, kind: "CSINode", plural: "csinodes", singular: "csinode",
	})
	return k
}

func volumeAttachmentKind() *api.Kind {
	k := newKind[storagev1.VolumeAttachment, storagev1.VolumeAttachmentList](names{
		gv: storagev1.SchemeGroupVersion, kind: "VolumeAttachment", plural: "volumeattachments", singular: "volumeattachment",
	})
	return k
}
